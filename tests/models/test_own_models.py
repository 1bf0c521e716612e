"""A user's own model: what it may be, and what is refused, in a line that names the parameter."""

import copy

import pytest
import torch
from helpers.own import MODELS, written
from torch import nn

from hvdtrain import models
from hvdtrain.base.config.run_config import RunConfig
from hvdtrain.base.errors import UsageError
from hvdtrain.base.numerics.flat import flatten_weights, trained
from hvdtrain.base.system.own_code import own_line
from hvdtrain.job.rank.process import _reason
from hvdtrain.job.recording.snapshot import write_tensors
from hvdtrain.job.training.memory import needed_bytes
from hvdtrain.job.training.model import initial_model, waits_for
from hvdtrain.launch.memory import rank_mb
from hvdtrain.models.own import batch_norm_and_dropout, code_hash, read_early
from hvdtrain.runs.request import check, check_functions

pytestmark = pytest.mark.usefixtures("one_thread")
ROWS = torch.randn(2, 12, generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    return written(tmp_path_factory.mktemp("own"), MODELS)


@pytest.mark.parametrize(
    "name", ["plain", "frozen", "lazy", "integers", "shared", "scalar", "attention"]
)
def test_a_model_that_can_be_trained_is_as_its_code_makes_it(mine, name, tmp_path):
    config = RunConfig(model=f"{mine}:{name}", seed=3)
    model, again = initial_model(check(config), 3, ROWS), initial_model(config, 3, ROWS)
    state = model.state_dict()
    assert all(torch.equal(values, state[key]) for key, values in again.state_dict().items())
    assert model.training and all(p.grad is None for p in model.parameters())
    scores = model.eval()(ROWS)
    assert flatten_weights(model).numel() == sum(p.numel() for p in trained(model))
    assert torch.equal(model(ROWS), scores)
    write_tensors(tmp_path / "weights.safetensors", model.state_dict())
    assert needed_bytes(model, ROWS[:1], 8, 0, "fp32") >= 8 * 4 * (3 + 12)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "two_outputs",
            "returns a tuple of 2 in evaluation: return scores, a tensor of shape [batch, 3]",
        ),
        ("in_training", "returns a tuple of 2 in training"),
        ("too_few", "returns a tensor of shape [2, 2] in evaluation"),
        ("nothing", "has no parameters to train"),
        (
            "unused",
            "parameter spare.weight has no part in the scores, and rings and servers need a gradient "
            "of all that is trained at every step: where a layer is left out in some steps (LayerDrop, "
            "mixture of experts), add its output times 0, `x + 0 * layer(x)`; freeze what is never",
        ),
        ("half", "parameter out.weight is bfloat16: weights are float32 here"),
        ("halves", "buffer table is bfloat16"),
        ("one_memory", "parameters 0.weight and 1.weight share memory and are two"),
        ("sparse", "parameter words.weight has sparse gradients"),
        ("raises", "failed in forward of a batch of shape [2, 12]: RuntimeError: "),
        ("fails", "failed to build: KeyError: 'weights.pt' (line "),
        ("number", "returned a int, and not an nn.Module"),
        ("scripted", "is compiled by torch.jit, which hides its layers"),
        ("absent", "there is no function absent in "),
        ("sized", "takes image_size: samples of shape [12] are no images"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_a_line(mine, name, words):
    with pytest.raises(UsageError) as refusal:
        models.make(f"{mine}:{name}", 3, inputs=ROWS)
    assert words in str(refusal.value) and f"--model {mine}:{name}" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def build(classes:\n", "cannot be imported: SyntaxError"),
        (
            "import nowhere\n",
            "cannot be imported: ModuleNotFoundError: No module named 'nowhere' (line 1 of bad.py)",
        ),
        ("raise SystemExit(3)\n", "cannot be imported: SystemExit: 3"),
        ("build = 3\ndef other(classes): pass\n", "no function build in .*bad.py: it has other"),
    ],
)
def test_a_file_that_cannot_be_imported_is_refused_in_a_line(tmp_path, source, words):
    with pytest.raises(UsageError, match=words.replace("(", r"\(").replace(")", r"\)")):
        models.make(f"{written(tmp_path, source, 'bad.py')}:build", 3, inputs=ROWS)


def test_the_line_of_an_error_is_the_user_s_unless_code_of_ours_raised_it(mine):
    model = models.make(f"{mine}:plain", 3, inputs=ROWS)
    with pytest.raises(RuntimeError) as too_wide:
        model(torch.rand(2, 13))
    line = MODELS.splitlines().index("        return self.out(self.first(x).relu())") + 1
    assert own_line(too_wide.value) == f"mine.py, line {line}"
    reason = _reason(too_wide.value, mine.parent)
    assert reason.startswith(f"mine.py, line {line} raised RuntimeError: ") and "\n" not in reason

    def wait(*_):
        check(RunConfig(mode="nosuch"))

    model.first.register_forward_pre_hook(wait)
    with pytest.raises(UsageError) as ours:
        model(ROWS)
    assert own_line(ours.value) == ""
    assert _reason(ours.value, mine.parent).startswith("unknown mode 'nosuch'")


def test_what_is_not_there_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(written(tmp_path, MODELS).parent)
    for name, words in (
        (f"{tmp_path}/none.py:build", "FileNotFoundError"),
        ("mine:plain", "for the file here give ./mine.py:plain"),
        ("mine.py", "mine.py names no function: give mine.py:build"),
        ("nowhere.models:build", "No module named 'nowhere'"),
        ("timm:resnet18", "needs timm, which is not installed: `uv pip install timm`"),
        ("vggf", "vggf takes images, and these samples are .12.: give --model"),
    ):
        with pytest.raises(UsageError, match=words):
            models.make(name, 3, inputs=ROWS)


def test_a_mistyped_name_is_told_without_running_code(tmp_path):
    marks = tmp_path / "imported"
    file = written(tmp_path, f"open({str(marks)!r}, 'w')\ndef build(n): pass\ndef data(): pass\n")
    check_functions([f"{file}:build", "vgg11", "torchvision.models:resnet18"], f"{file}:data")
    with pytest.raises(
        UsageError, match="no function buidl in .*: it has build, data; did you mean build"
    ):
        check_functions([f"{file}:buidl"], "digits")
    with pytest.raises(UsageError, match="there is no file mines.py; did you mean mine.py?"):
        check_functions([f"{tmp_path}/mines.py:build"], "digits")
    for source in (
        "from os import *\n",
        "globals()['any'] = 3\n",
        "import x as any\n",
        "any = 3\n",
    ):
        check_functions([f"{written(tmp_path, source, 'other.py')}:any"], "digits")
    assert not marks.exists()


def test_it_takes_what_it_asks_for_and_may_be_in_a_package(mine):
    sized = models.make(f"{mine}:sized", 10, inputs=torch.rand(2, 3, 8, 8))
    assert isinstance(sized, nn.Sequential) and sized[1].weight.shape == (10, 3 * 8 * 8)
    assert not models.is_own("vgg16") and models.is_own("torchvision.models:resnet18")
    for name, dropout in (("resnet18", False), ("MobileNetV2", True)):
        model = models.make(f"torchvision.models:{name}", 10, inputs=torch.rand(2, 3, 32, 32))
        assert batch_norm_and_dropout(model) == {"batch_norm": True, "dropout_layers": dropout}


def test_a_trial_leaves_weights_and_statistics_as_they_were(tmp_path):
    path = written(
        tmp_path,
        "from torch import nn\nseen = []\ndef build(n):\n    m = nn.Sequential("
        "nn.Linear(12, 4), nn.BatchNorm1d(4), nn.Linear(4, n))\n    seen.append({k: v.clone() for k, v in "
        "m.state_dict().items()})\n    return m\n",
    )
    model = models.make(f"{path}:build", 3, inputs=ROWS)
    from hvdtrain.base.system.own_code import load

    before = load(f"{path}:build", "--model").__globals__["seen"][-1]
    assert all(torch.equal(values, before[key]) for key, values in model.state_dict().items())


def test_the_hash_is_of_the_file_that_was_imported(tmp_path):
    path = written(tmp_path, MODELS)
    models.make(f"{path}:plain", 3, inputs=ROWS)
    first = code_hash(f"{path}:plain")
    path.write_text(MODELS + "# changed meanwhile\n")
    assert first and first.startswith("sha256:") and code_hash(f"{path}:plain") == first
    other = written(tmp_path, MODELS + "# changed\n", "other.py")
    models.make(f"{other}:plain", 3, inputs=ROWS)
    assert code_hash(f"{other}:plain") != first and code_hash("vgg11") is None


def test_layers_wait_only_where_they_read_their_own_weights(mine):
    layers, early = (
        initial_model(RunConfig(model=f"{mine}:{name}"), 3, ROWS) for name in ("plain", "attention")
    )
    before = copy.deepcopy(early.state_dict())
    assert read_early(layers, ROWS) == ""
    assert read_early(early, ROWS) == "heads.out_proj.weight"
    assert all(torch.equal(values, before[key]) for key, values in early.state_dict().items())
    config = RunConfig(mode="ps-async", servers=1, model=f"{mine}:attention")
    assert (waits_for(config, early, ROWS), waits_for(config, layers, ROWS)) == ("step", "layer")
    asked = RunConfig(mode="ps-async", servers=1, model=config.model, wait_for="layer")
    with pytest.raises(
        UsageError, match="reads its parameter heads.out_proj.weight before the layer"
    ):
        waits_for(asked, early, ROWS)


@pytest.mark.parametrize(
    "options",
    [
        {"width": 0.5},
        {"dropout": 0.5},
        {"freeze": "features", "pretrained": "w.pt"},
        {"pretrained": "imagenet"},
    ],
)
def test_options_of_our_models_are_not_for_others(mine, options):
    with pytest.raises(UsageError, match="does nothing in|is for VGGs"):
        check(RunConfig(model=f"{mine}:plain", **options))


def test_memory_is_that_of_its_weights(tmp_path):
    path = written(
        tmp_path,
        "from torch import nn\ndef build(n): return nn.Sequential(nn.Linear(10**4, 2600), "
        "nn.Linear(2600, n))\n",
    )
    small, large = (rank_mb(RunConfig(model=name), 1) for name in ("cnn", f"{path}:build"))
    # weights, gradients, two of Adam's
    assert large - small == pytest.approx(4 * (26e6 + 2.6e6) * 4 / 2**20, rel=0.01)
    assert rank_mb(RunConfig(model=f"{tmp_path}/elsewhere.py:build"), 1) == small
