"""Where a worker begins: at the first step, after a snapshot, or beside others that train already."""

from dataclasses import dataclass, field

from hvdtrain.config.run_config import RunConfig
from hvdtrain.coordination.joining import Arrival
from hvdtrain.runs.metrics import Tally
from hvdtrain.runs.snapshot import Snapshot
from hvdtrain.training.history import History
from hvdtrain.world.place import World


@dataclass(frozen=True)
class Start:
    """As it is, it is the first step's.

    Attributes:
        step: that of the snapshot, or 0.
        history: what training has come to.
        tally: what all workers had counted at the snapshot, on the first of them.
        slowed: how long this worker had computed and slept by then, if --slow was the same.
        joins: the others train already. All others begin together.
        age_s: of one that joins, for how long the others have trained since they were together.
    """

    step: int = 0
    history: History = field(default_factory=History)
    tally: Tally | None = None
    slowed: tuple[float, float] = (0.0, 0.0)
    joins: bool = False
    age_s: float = 0.0

    @classmethod
    def after(cls, snapshot: Snapshot, config: RunConfig, world: World) -> "Start":
        state = snapshot.state
        tally = Tally(**state["tally"]) if world.is_chief else None
        if tally:  # in a snapshot, means over workers
            tally.seconds = [spent * world.workers for spent in tally.seconds]
        same = state["config"].get("slow") == config.slow  # of another --slow, what there was says nothing
        slowed = state.get("slowed", {}).get(str(world.worker)) if same else None
        return cls(snapshot.step, History(**state.get("history", {})), tally, tuple(slowed or (0.0, 0.0)))

    @classmethod
    def beside(cls, arrival: Arrival) -> "Start":
        return cls(history=History(**arrival.state["history"]), joins=True, age_s=arrival.age_s)
