"""Lightning's Trainer with ``strategy="mfsdp"`` on two ranks: the numbers of unsharded training."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import mfsdp
from mfsdp.integrations.lightning import MFSDPStrategy
from tests.helpers.models import MLP
from tests.helpers.ranks import collectives_told

pytestmark = pytest.mark.dist
EAGER = {"lowering": "eager"}
BATCH, BATCHES, WIDTH = 2, 5, 13


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(MLP(WIDTH, 19), MLP(WIDTH, 19))
        self.head = nn.Linear(WIDTH, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


class Learner(pl.LightningModule):
    def __init__(self, lr: float = 1e-2):
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(7)
        self.net, self.last = Net(), nn.Linear(7, 3)
        self.begin()

    def begin(self) -> None:
        self.losses: list[float] = []
        self.seen: dict[str, float] = {}
        self.fails_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.net(x))

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == self.fails_at:
            raise KeyError("asked for")
        loss = (self(batch[0]).float() - 0.5).square().mean()
        self.losses.append(float(loss.detach()))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.last(self.net(batch[0])).float().square().mean(), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(batch[0]).float()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"], eps=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def data(less: int = 0) -> DataLoader:
    """Batches of this rank; of a process without ranks, what two of them see together. The last one is smaller."""
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    x = torch.randn(2 * (BATCH * BATCHES - less), WIDTH, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(x[rank::world]), batch_size=2 * BATCH // world)


def trainer(folder: Any, strategy: Any = "auto", **more: Any) -> Any:
    warnings.filterwarnings("ignore")
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if dist.is_initialized():  # as torchrun has it
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "GROUP_RANK": "0",
                       "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "x"}  # fmt: skip
    usual = {"max_epochs": 1, "num_sanity_val_steps": 0, "use_distributed_sampler": False, "accelerator": "cpu",
             "logger": False, "enable_progress_bar": False, "enable_model_summary": False, "devices": world,
             "enable_checkpointing": False, "default_root_dir": folder, "strategy": strategy}  # fmt: skip
    return pl.Trainer(**usual | more)


def ours(**given: Any) -> MFSDPStrategy:
    return MFSDPStrategy(options=EAGER, **given)


def whole(module: nn.Module) -> dict[str, torch.Tensor]:
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for n, t in module.state_dict().items()}


def on_ranks(folder: str, build: Any, given: dict[str, Any], less: int, more: dict[str, Any]) -> Any:
    module = build()
    told: list[str] = []
    with collectives_told(lambda kind, group: told.append(kind)):
        trainer(folder, ours(**given), **more).fit(module, data(less))
    return module.losses, whole(module), {kind: told.count(kind) for kind in set(told)}


def parity(
    folder: Path, ranks: Any, given: Any = None, build: Any = Learner, near: float = 1e-5, less: int = 0, **more: Any
) -> Any:
    """Fits on ranks and without; losses and weights are equal. What was communicated."""
    got = ranks.run(on_ranks, str(folder), build, given or {}, less, more)
    reference = build()
    trainer(folder, **more).fit(reference, data(less))
    losses = torch.tensor([got[0][0], got[1][0]]).mean(0)
    torch.testing.assert_close(losses, torch.tensor(reference.losses), rtol=near, atol=near)
    for _, weights, _ in got:
        torch.testing.assert_close(weights, whole(reference), rtol=near, atol=near)
    return got[0][2]


@pytest.mark.parametrize("given", [{}, {"strategy": 1, "units": [MLP]}], ids=["auto", "optim"])
def test_fit(two_ranks, tmp_path, given):
    parity(tmp_path, two_ranks, given)


def test_accumulation_communicates_once_for_a_step(two_ranks, tmp_path):
    """Five batches, two for a step: the last step has one, and that is smaller."""
    units = len(["blocks.0", "blocks.1", "(root)"])
    told = parity(tmp_path, two_ranks, accumulate_grad_batches=2, less=1)
    assert told["scatter"] == 3 * units
    told = parity(tmp_path, two_ranks, {"hold": False}, accumulate_grad_batches=2)
    assert told["scatter"] == BATCHES * units


@pytest.mark.parametrize("how", ["norm", "value"])
def test_clipping(two_ranks, tmp_path, how):
    parity(tmp_path, two_ranks, gradient_clip_val=0.01, gradient_clip_algorithm=how)


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_precision(two_ranks, tmp_path, precision):
    parity(tmp_path, two_ranks, near=3e-2, precision=precision)


class Evaluated(Learner):
    def on_validation_end(self) -> None:
        self.seen["val"] = float(self.trainer.callback_metrics["val"])


def evaluates(folder: str) -> Any:
    strategy = ours() if dist.is_initialized() else "auto"
    module, run = Evaluated(), trainer(folder, strategy, limit_train_batches=2, num_sanity_val_steps=1)
    run.fit(module, data(), data())
    seen = dict(module.seen)
    tested = run.test(module, data(), verbose=False)[0]["val"]
    predicted = torch.cat(run.predict(module, data()))
    fresh = run.validate(Evaluated(), data(), verbose=False)[0]["val"]
    return seen["val"], tested, fresh, predicted


def test_evaluation(two_ranks, tmp_path):
    got, want = two_ranks.run(evaluates, str(tmp_path)), evaluates(str(tmp_path))
    for numbers in got:
        assert numbers[:3] == pytest.approx(want[:3], rel=1e-5)
    together = torch.stack([got[0][3], got[1][3]], 1).flatten(0, 1)
    torch.testing.assert_close(together, want[3], rtol=1e-5, atol=1e-5)


# Checkpoints


def resumes(folder: str, distributed: bool) -> Any:
    """Two epochs at once, and one by one: losses of the second are the same."""
    straight, first, second = Learner(), Learner(), Learner()
    kept = {"save_distributed_checkpoint": distributed}
    trainer(folder, ours(**kept), max_epochs=2).fit(straight, data())
    run = trainer(folder, ours(**kept))
    run.fit(first, data())
    path, light = Path(folder, f"{distributed}.ckpt"), Path(folder, f"{distributed}-weights.ckpt")
    for _ in range(2):  # over itself
        run.save_checkpoint(path)
    run.save_checkpoint(light, weights_only=True)
    again = trainer(folder, ours(**kept), max_epochs=2)
    with torch.no_grad():
        second.last.weight.zero_()
    again.fit(second, data(), ckpt_path=str(path))
    assert second.losses == straight.losses[BATCHES:] and again.global_step == 2 * BATCHES
    assert path.is_dir() == distributed
    third = Learner()
    with torch.no_grad():
        third.last.weight.zero_()
    tested = [trainer(folder, ours(**kept)).test(m, data(), ckpt_path=c, verbose=False)[0]["val"]
              for m, c in ((third, str(light)), (first, None))]  # fmt: skip
    assert tested[0] == tested[1]
    with pytest.raises(KeyError, match="contains only the model"):
        trainer(folder, ours(**kept), max_epochs=2).fit(Learner(), data(), ckpt_path=str(light))
    return straight.losses


def test_resume_from_a_folder(two_ranks, tmp_path):
    two_ranks.run(resumes, str(tmp_path), True)


def goes_on(folder: str, path: str, strategy: Any) -> list[float]:
    module = Learner()
    trainer(folder, strategy, max_epochs=2).fit(module, data(), ckpt_path=path)
    return module.losses


def goes_on_sharded(folder: str, path: str) -> list[float]:
    return goes_on(folder, path, ours())


def test_resume_from_a_file(two_ranks, tmp_path):
    """Ours is read unsharded, and an unsharded one by us."""
    losses = torch.tensor(two_ranks.run(resumes, str(tmp_path), False)).mean(0)
    unsharded = goes_on(str(tmp_path), str(tmp_path / "False.ckpt"), "auto")
    torch.testing.assert_close(torch.tensor(unsharded), losses[BATCHES:], rtol=1e-5, atol=1e-5)
    assert isinstance(Learner.load_from_checkpoint(tmp_path / "False.ckpt").last.weight, nn.Parameter)
    one = trainer(tmp_path)
    one.fit(Learner(), data())
    one.save_checkpoint(tmp_path / "one.ckpt")
    theirs = torch.tensor(two_ranks.run(goes_on_sharded, str(tmp_path), str(tmp_path / "one.ckpt"))).mean(0)
    torch.testing.assert_close(theirs, losses[BATCHES:], rtol=1e-5, atol=1e-5)


class FSDP2(Learner):
    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for module in (*self.net.blocks, self):
            torch.distributed.fsdp.fully_shard(module, mesh=mesh)


def exchanges(folder: str) -> None:
    """Lightning's own strategy for FSDP2 goes on from a folder of ours, and we from one of its."""

    def theirs() -> Any:
        return ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)

    losses: dict[str, Any] = {}
    both = {"ours": (ours, Learner), "theirs": (theirs, FSDP2)}
    for name, (strategy, build) in both.items():
        run = trainer(folder, strategy())
        run.fit(build(), data())
        run.save_checkpoint(Path(folder, name))
    for name, path in (("theirs", "theirs"), ("ours", "theirs"), ("theirs", "ours")):
        strategy, build = both[name]
        module = build()
        trainer(folder, strategy(), max_epochs=2).fit(module, data(), ckpt_path=str(Path(folder, path)))
        losses[f"{name} from {path}"] = module.losses
    want = losses["theirs from theirs"]
    for name, got in losses.items():
        assert got == pytest.approx(want, rel=1e-5), name


@pytest.mark.slow
def test_exchange_with_fsdp2(two_ranks, tmp_path):
    two_ranks.run(exchanges, str(tmp_path))


class Grouped(Learner):
    """Groups that are not in the model's order, and no state (SGD)."""

    def configure_optimizers(self) -> Any:
        two = [p for p in self.parameters() if p.ndim > 1], [p for p in self.parameters() if p.ndim < 2]
        kind = torch.optim.SGD if self.hparams["lr"] > 0.05 else torch.optim.AdamW
        return kind([{"params": two[0]}, {"params": two[1], "weight_decay": 0.0}], lr=self.hparams["lr"])


class Other(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


def says(kind: type[BaseException], match: str, function: Any) -> None:
    with pytest.raises(kind, match=match):
        function()


def edges(folder: str) -> None:
    """Groups, empty state, another model, what is no checkpoint."""
    for lr, distributed in ((1e-2, False), (1e-2, True), (0.1, True)):
        kept, path = {"save_distributed_checkpoint": distributed}, str(Path(folder, f"{lr}{distributed}"))
        module, run = Grouped(lr), trainer(folder, ours(**kept))
        if lr != 1e-2 or not distributed:
            straight = Grouped(lr)
            trainer(folder, ours(**kept), max_epochs=2).fit(straight, data())
        run.fit(module, data())
        run.save_checkpoint(path)
        module = Grouped(lr)
        trainer(folder, ours(**kept), max_epochs=2).fit(module, data(), ckpt_path=path)
        assert module.losses == straight.losses[BATCHES:], (lr, distributed)
        if lr != 1e-2:
            continue
        says(RuntimeError, "missing.*more.weight", lambda path=path: trainer(folder, ours()).test(
            Other(), data(), ckpt_path=path, verbose=False))  # fmt: skip
        lenient = Other()
        lenient.strict_loading = False
        trainer(folder, ours()).test(lenient, data(), ckpt_path=path, verbose=False)
        torch.testing.assert_close(whole(lenient)["last.weight"], whole(run.lightning_module)["last.weight"])
    says(ValueError, "has groups of .1[0-9]?. parameters|has groups of .*configure_optimizers gives", lambda: trainer(
        folder, ours(), max_epochs=2).fit(Learner(), data(), ckpt_path=str(Path(folder, "0.01False"))))  # fmt: skip
    says(ValueError, "there is nothing", lambda: trainer(folder, ours()).test(
        Learner(), data(), ckpt_path=str(Path(folder, "none"))))  # fmt: skip
    if dist.get_rank() == 0:
        Path(folder, "0.01True", "meta.pt").unlink()
    dist.barrier()
    says(ValueError, "is missing, so it is not complete", lambda: trainer(folder, ours()).test(
        Learner(), data(), ckpt_path=str(Path(folder, "0.01True"))))  # fmt: skip


@pytest.mark.slow
def test_checkpoints_at_the_edges(two_ranks, tmp_path):
    two_ranks.run(edges, str(tmp_path))


# Modules of other kinds


class Late(Learner):
    """Builds its model on the meta device, when the Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__()
        del self.net, self.last
        self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(7)
            with torch.device("meta" if dist.is_initialized() else "cpu"):
                self.net, self.last = nn.Sequential(*(nn.Linear(WIDTH, n) for n in (WIDTH, WIDTH, 7))), nn.Linear(7, 3)


class Sharded(Learner):
    """Shards itself, or only its blocks."""

    def configure_model(self) -> None:
        if dist.is_initialized() and not isinstance(self.net.blocks[0], mfsdp.FSDPModule):
            for block in self.net.blocks:
                mfsdp.fully_shard(block)
            if self.hparams["lr"] < 0.05:
                mfsdp.fully_shard(self)


class Blocks(Sharded):
    def __init__(self) -> None:
        super().__init__(lr=0.1)


class Adversaries(Learner):
    """Two optimizers by hand, and accumulation by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        one, two = self.optimizers()
        for optimizer, sign in ((one, 1), (two, -1)):
            self.toggle_optimizer(optimizer)
            loss = sign * self(batch[0]).float().square().mean() / 2
            optimizer.zero_grad()
            self.manual_backward(loss)
            if optimizer is one:
                self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
                self.manual_backward(self.last(self.net(batch[0])).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)
            self.losses.append(float(loss.detach()))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), 0.1), torch.optim.SGD(self.last.parameters(), 0.05)


class Penalised(Learner):
    """Has a parameter of its own, reads weights in ``training_step``, and steps on flat buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))
        self.last.weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * super().forward(x)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = (self.net(batch[0]) @ self.last.weight.detach().new_ones(7)).square().mean()
        loss = loss + super().training_step(batch, index) + 0.1 * self.net.head.weight.square().sum()
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2, eps=1e-2)
        return mfsdp.fully_shard_optimizer(optimizer) if dist.is_initialized() else optimizer


@pytest.mark.parametrize("build", [Late, Sharded, Blocks, Adversaries, Penalised])
def test_modules(two_ranks, tmp_path, build):
    parity(tmp_path, two_ranks, build=build)


def fails(folder: str) -> Any:
    """A fit that ends between two microbatches of a step, on all ranks; the next one starts afresh."""
    module = Learner()
    module.fails_at = 1
    says(KeyError, "asked for", lambda: trainer(folder, ours(), accumulate_grad_batches=2).fit(module, data()))
    module.begin()
    trainer(folder, ours(), accumulate_grad_batches=2).fit(module, data())
    return module.losses


def test_after_an_exception(two_ranks, tmp_path):
    got = torch.tensor(two_ranks.run(fails, str(tmp_path))).mean(0)
    module = Learner()
    trainer(tmp_path, accumulate_grad_batches=2).fit(module, data())
    torch.testing.assert_close(got, torch.tensor(module.losses), rtol=1e-5, atol=1e-5)


def refuses(folder: str) -> None:
    def fit(given: Any, build: Any = Learner, **more: Any) -> Any:
        module = build() if isinstance(build, type) else build
        trainer(folder, ours(**given), **more).fit(module, data())
        return module

    policy = mfsdp.MixedPrecisionPolicy(compute_dtype=torch.bfloat16)
    says(ValueError, "both say dtypes", lambda: fit({"mp_policy": policy}, precision="bf16-mixed"))
    says(ValueError, "choose one of 32-true", lambda: fit({}, precision=None, plugins=[Odd()]))
    says(NotImplementedError, "sync_batchnorm", lambda: fit({}, sync_batchnorm=True))
    says(ValueError, "matches nothing|no module", lambda: fit({"units": ["nowhere"]}))
    says(ValueError, "net is compiled already", lambda: fit({}, Compiled))
    says(ValueError, "already: give units", lambda: fit({"units": [MLP]}, Sharded))
    trained = fit({"units": [MLP]})
    fit({"units": [MLP]}, trained)
    says(ValueError, "or a new module", lambda: fit({"units": [MLP]}, trained, precision="bf16-mixed"))
    mesh = MFSDPStrategy(mesh={"dp_shard": 1, "tp": 2})
    run = trainer(folder, mesh)
    mesh.connect(Learner())
    mesh.setup_environment()
    assert mesh.distributed_sampler_kwargs == {"num_replicas": 1, "rank": 0} and mesh.device_mesh["tp"].size() == 2
    assert run.strategy is mesh
    mesh = MFSDPStrategy()
    mesh.accelerator, mesh.cluster_environment, mesh.parallel_devices = (
        run.accelerator, run.strategy.cluster_environment, run.strategy.parallel_devices)  # fmt: skip
    mesh.connect(Learner())
    mesh.setup_environment()
    assert mesh.distributed_sampler_kwargs == {"num_replicas": 2, "rank": dist.get_rank()}


class Compiled(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.compile(self.net)


class Odd(pl.plugins.Precision):
    precision = "8-odd"


@pytest.mark.slow
def test_refusals_on_ranks(two_ranks, tmp_path):
    two_ranks.run(refuses, str(tmp_path))


def test_arguments(tmp_path):
    says(ValueError, "does not know the option 'nothing'", lambda: MFSDPStrategy(options={"nothing": 1}))
    says(TypeError, "does not know unit;", lambda: MFSDPStrategy(unit=[MLP]))
    says(ValueError, "sizes of axes", lambda: MFSDPStrategy(mesh={"dp_shard": 0}))
    io = pl.plugins.io.TorchCheckpointIO()
    says(ValueError, "writes checkpoints itself", lambda: trainer(tmp_path, ours(), plugins=[io]))
    assert type(trainer(tmp_path, "mfsdp").strategy) is MFSDPStrategy


def test_traces_where_lightning_is_imported():
    """Lightning's `torch.compile` copies what it is given with a model, and process groups have no copies."""
    model = Net()
    with mfsdp.fake_ranks(4):
        model.group = dist.new_group()
        assert mfsdp.trace(model, (torch.randn(BATCH, WIDTH),)).forward


SCRIPT = """
import importlib, sys, torch
pl = importlib.import_module(sys.argv[2])
import mfsdp.integrations.lightning

class Learner(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 8))

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    validation_step = training_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

if __name__ == "__main__":
    trainer = pl.Trainer(strategy="mfsdp", devices=int(sys.argv[3]), accelerator="cpu", max_epochs=2, logger=False,
                         default_root_dir=sys.argv[1])
    data = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=8)
    trainer.fit(Learner(), data)
    trainer.validate(dataloaders=data, ckpt_path="best")
    print("saved", trainer.checkpoint_callback.best_model_path)
"""


@pytest.mark.slow
@pytest.mark.inductor
@pytest.mark.parametrize(
    "package, devices",
    [
        ("pytorch_lightning", 2),
        *(pytest.param("lightning.pytorch", devices, marks=pytest.mark.exhaustive) for devices in (1, 2)),
    ],
)
def test_a_script(tmp_path, package, devices):
    """Everything by default: Lightning starts the other rank, draws its table and saves. One process does without."""
    (tmp_path / "train.py").write_text(SCRIPT)
    clean = {n: v for n, v in os.environ.items() if n not in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "GROUP_RANK")}
    command = [sys.executable, str(tmp_path / "train.py"), str(tmp_path), package, str(devices)]
    out = subprocess.run(command, text=True, env=clean, capture_output=True, timeout=240)
    assert out.returncode == 0 and "saved" in out.stdout, out.stderr[-3000:]
    assert [p.is_dir() for p in (tmp_path / "checkpoints").iterdir()] == [True]


def infers(folder: str) -> list[float]:
    """What Lightning does where ranks are not gloo's: it evaluates, first and in between, in inference mode."""
    model = mfsdp.fully_shard(Learner().net, units=[MLP])
    model.compile(backend="mfsdp", options=EAGER)
    optimizer, x = torch.optim.SGD(model.parameters(), 0.1), data().dataset.tensors[0]
    out = []
    for _ in range(3):
        with torch.inference_mode():
            out.append(float(model.eval()(x).square().mean()))
        loss = model.train()(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(float(loss.detach()))
    return out


def test_inference_mode(two_ranks, tmp_path):
    for losses in two_ranks.run(infers, str(tmp_path)):
        assert losses[::2] == pytest.approx(losses[1::2]) and losses[0] > losses[2] > losses[4]
