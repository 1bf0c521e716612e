"""Where a worker begins: at the first step, after a snapshot, or in a running job."""

from dataclasses import dataclass, field

from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.world.place import World
from hvdtrain.job.coordination.joining import Arrival
from hvdtrain.job.recording.metrics import Tally
from hvdtrain.job.recording.snapshot import Snapshot
from hvdtrain.job.training.history import History


@dataclass(frozen=True)
class Start:
    """Where a worker begins. The defaults are the beginning of a run.

    Attributes:
        step: the step of the snapshot that training goes on from, or 0.
        history: the results of training so far.
        tally: the counts of all workers up to the snapshot; on the first worker only.
        slowed: the seconds that this worker had computed and slept up to the snapshot, if `--slow`
            was the same.
        joins: whether the other workers are training already. Otherwise all workers begin together.
        age_s: for how many seconds the others had trained when this worker joined.
    """

    step: int = 0
    history: History = field(default_factory=History)
    tally: Tally | None = None
    slowed: tuple[float, float] = (0.0, 0.0)
    joins: bool = False
    age_s: float = 0.0

    @classmethod
    def after(cls, snapshot: Snapshot, config: RunConfig, world: World) -> "Start":
        """Returns where this worker goes on after a snapshot."""
        state = snapshot.state
        history = History(**state.get("history", {}))
        tally = None
        if world.is_chief:
            tally = Tally(**state["tally"])
            # A snapshot has means over the workers.
            tally.scale_seconds(world.workers)
        slowed = None
        # Seconds with another --slow say nothing of this one.
        if state["config"].get("slow") == config.slow:
            slowed = state.get("slowed", {}).get(str(world.worker))
        computed_s, slept_s = slowed or (0.0, 0.0)
        return cls(snapshot.step, history, tally, (computed_s, slept_s))

    @classmethod
    def beside(cls, arrival: Arrival) -> "Start":
        """Returns where a worker begins that joins a running job."""
        return cls(history=History(**arrival.state["history"]), joins=True, age_s=arrival.age_s)
