"""What TransformerEngine's modules, quantised tensors and optimizer do with what we touch, on a CPU and without it."""

from __future__ import annotations

import pickle
import types
import weakref
from typing import Any

import torch
from torch import nn

FP8 = torch.float8_e4m3fn

LIBRARY = torch.library.Library("mfsdp_engine", "DEF")
LIBRARY.define("linear(Tensor x, Tensor w, bool keeps) -> (Tensor, Tensor)")
LIBRARY.define("linear_backward(Tensor g, Tensor x, Tensor w) -> (Tensor, Tensor)")


def _linear(x: torch.Tensor, w: torch.Tensor, keeps: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes with a quantised weight, given as it is or as its payload, and keeps it for backward."""
    q = w.view(FP8) if w.dtype == torch.uint8 else w.to(FP8)
    kept = q.view(torch.uint8) if keeps else w.new_empty(0, dtype=torch.uint8)
    return x @ q.to(x.dtype).t(), kept


def _linear_backward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    q = w.view(FP8) if w.dtype == torch.uint8 else w.to(FP8)
    return g @ q.to(g.dtype), g.flatten(0, -2).t() @ x.flatten(0, -2)


for _name, _what in (("linear", _linear), ("linear_backward", _linear_backward)):
    LIBRARY.impl(_name, _what, "CompositeExplicitAutograd")
    torch.library.register_fake(f"mfsdp_engine::{_name}", _what, lib=LIBRARY)


def _save(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, keeps = inputs
    ctx.save_for_backward(x, output[1] if keeps else w)
    ctx.set_materialize_grads(False)


def _back(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor, torch.Tensor, None]:
    return (*torch.ops.mfsdp_engine.linear_backward(grad, *ctx.saved_tensors), None)


torch.library.register_autograd("mfsdp_engine::linear", _back, setup_context=_save, lib=LIBRARY)


class QuantizedTensor(torch.Tensor):
    """One byte per element and a scale, under the name of a wider dtype."""

    __module__ = "transformer_engine.pytorch.quantized_tensor"

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype, requires_grad: bool = False) -> Any:
        out: Any = torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=dtype, requires_grad=requires_grad)
        out._data, out._scale, out._dtype = data, scale, dtype
        return out

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    @classmethod
    def of(cls, value: torch.Tensor) -> QuantizedTensor:
        scale = value.abs().max().float() / 448
        return cls((value / scale).to(FP8).view(torch.uint8), scale, value.dtype)

    def dequantize(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        return (self._data.view(FP8).float() * self._scale).to(dtype or self._dtype)

    def detach(self) -> Any:
        return type(self)(self._data, self._scale, self._dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0].detach()
        raise NotImplementedError(f"{func} of a quantised tensor")


class GroupedTensor(QuantizedTensor):
    __module__ = "transformer_engine.pytorch.tensor.grouped_tensor"


class TransformerEngineBaseModule(nn.Module):
    __module__ = "transformer_engine.pytorch.module.base"

    def __init__(self) -> None:
        super().__init__()
        self.primary_weights_in_fp8 = False
        self.fsdp_group = None
        self.activation_dtype: torch.dtype | None = None
        self.allow_different_data_and_param_types = False
        self.parallel_mode, self.tp_size = None, 1
        self._fp8_workspaces: dict[str, Any] = {}
        self.scale: torch.Tensor | None = None
        """Of DelayedScaling, once a forward has run under it."""

    def fast_setattr(self, name: str, value: Any) -> None:
        self.__dict__[name] = value

    @property
    def is_fsdp2(self) -> bool:
        return getattr(self, "_is_fsdp2", False)

    def register_parameter(self, name: str, param: Any, **how: Any) -> None:
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        for name, param in self.named_parameters(recurse=False):
            nn.init.normal_(param)
            nn.Module.__setattr__(self, name, nn.Parameter(param))

    def set_activation_dtype(self, inp: torch.Tensor) -> None:
        for name, param in self.named_parameters():
            if param.dtype != inp.dtype:
                raise TypeError(f"Found input dtype: {inp.dtype} and {name!r} dtype: {param.dtype}")
        self.fast_setattr("activation_dtype", inp.dtype)

    def get_extra_state(self) -> torch.Tensor:
        if self.scale is None:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(bytearray(pickle.dumps(self.scale.tolist())), dtype=torch.uint8)

    def set_extra_state(self, state: torch.Tensor) -> None:
        if state.numel():
            self.scale = torch.tensor(pickle.loads(state.numpy().tobytes()))


class Linear(TransformerEngineBaseModule):
    """``quantised``: as under ``quantized_model_init``; ``preserved``: with the value from before."""

    __module__ = "transformer_engine.pytorch.module.linear"

    def __init__(
        self,
        inputs: int,
        outputs: int,
        fuse_wgrad_accumulation: bool = False,
        quantised: bool = False,
        preserved: bool = False,
        compiles: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cpu",
        value: torch.Tensor | None = None,
    ):
        super().__init__()
        self.fuse_wgrad_accumulation, self.compiles = fuse_wgrad_accumulation, compiles
        if value is None:
            value = torch.empty(outputs, inputs, dtype=dtype, device=device).normal_()
        weight = nn.Parameter(QuantizedTensor.of(value) if quantised else value)
        if quantised:
            self.primary_weights_in_fp8 = True
            weight.tensor_model_parallel = False
        if preserved:
            weight._high_precision_init_val = value
            weight.get_high_precision_init_val = types.MethodType(lambda w: w._high_precision_init_val, weight)
        self.register_parameter("weight", weight, init_fn=None)
        self.bias = torch.Tensor()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.compiles:
            return self._forward(x)
        self.set_activation_dtype(x)
        return torch.ops.mfsdp_engine.linear(x, self.weight, not self.is_fsdp2)[0]

    @torch.compiler.disable
    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        self.set_activation_dtype(x)
        return torch.ops.mfsdp_engine.linear(x, self.weight, not self.is_fsdp2)[0]


def _gemm(grad: torch.Tensor, x: torch.Tensor, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """``general_gemm`` and ``general_grouped_gemm`` for a weight's gradient: into ``out``, in its dtype."""
    if out is None:
        return grad.t() @ x
    made = (grad.t().to(out.dtype) @ x.to(out.dtype)) if x.numel() else torch.zeros_like(out)
    return out.add_(made) if accumulate else out.copy_(made)


class _Multiply(torch.autograd.Function):
    """What ``_LayerNormLinear``, ``_LayerNormMLP`` and ``_GroupedLinear`` do of a weight and its gradient: rows of the
    input, in turn, by one weight each (``splits``), or all by one after the other.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, splits: Any, fuse: bool, first: bool | None, *weights: Any) -> torch.Tensor:
        ctx.splits, ctx.fuse, ctx.first = splits, fuse, first
        ctx.trains = [w.requires_grad for w in weights]
        ctx.weights = weights  # `ctx.weight`, `ctx.fc1_weight`: nobody reads them
        if fuse:
            ctx.refs = [weakref.ref(w) for w in weights]
            ctx.overwrites = [getattr(w, "overwrite_main_grad", False) for w in weights]
            if all(hasattr(w, "__fsdp_param__") for w in weights):
                ctx.main_grad_funcs = [w.get_main_grad for w in weights]
            else:
                ctx.main_grad_funcs = [lambda w=w: w.main_grad for w in weights]
        inputs, out = _Multiply.multiply(x, splits, weights)
        ctx.save_for_backward(*inputs, *weights)
        return out

    @staticmethod
    def multiply(x: torch.Tensor, splits: Any, weights: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        if splits is not None:
            parts = list(x.split(splits))
            return parts, torch.cat([part @ w.t() for part, w in zip(parts, weights, strict=True)])
        inputs = []
        for w in weights:
            inputs.append(x)
            x = x @ w.t()
        return inputs, x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        count = len(ctx.trains)
        saved = ctx.saved_tensors
        inputs, weights = saved[:count], saved[count:]
        origins: list[Any] = [None] * count
        main_grads: list[Any] = [None] * count
        if ctx.fuse:
            refs, ctx.refs = ctx.refs, None
            origins = [ref() if trains else None for ref, trains in zip(refs, ctx.trains, strict=True)]
            for i, trains in enumerate(ctx.trains):
                if trains:
                    assert origins[i] is not None, "weight was removed while fuse_wgrad_accumulation=True"
                    origins[i].main_grad = main_grads[i] = ctx.main_grad_funcs[i]()
        accumulate = ctx.fuse and not ctx.first if ctx.first is not None else ctx.fuse
        wgrads: list[Any] = [None] * count
        grads = list(grad.split(ctx.splits)) if ctx.splits is not None else [grad] * count
        for i in reversed(range(count)):
            g = grads[i]
            if ctx.trains[i]:
                wgrads[i] = _gemm(g, inputs[i], main_grads[i], accumulate and not (ctx.fuse and ctx.overwrites[i]))
                if ctx.fuse:
                    wgrads[i] = _Multiply.dummy(origins[i], main_grads[i])
            grads[i] = g @ weights[i]
            if ctx.splits is None and i:
                grads[i - 1] = grads[i]
        dgrad = torch.cat(grads) if ctx.splits is not None else grads[0]
        return dgrad, None, None, None, *wgrads

    @staticmethod
    def dummy(origin: Any, main_grad: torch.Tensor) -> torch.Tensor | None:
        """``get_dummy_wgrad``: what was there before."""
        if not hasattr(origin, "grad_added_to_main_grad"):
            return None
        origin.grad_added_to_main_grad = True
        return torch.full_like(main_grad, 0.0 if getattr(origin, "zero_out_wgrad", False) else torch.nan)


class _Multiplies(TransformerEngineBaseModule):
    """``quantised`` etc. of `Linear` it has not."""

    def __init__(self, names: list[str], shape: tuple[int, int], fuse_wgrad_accumulation: bool, dtype: torch.dtype):
        super().__init__()
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randint(-1, 2, shape).to(dtype)))

    @torch.compiler.disable
    def forward(self, x: torch.Tensor, splits: Any = None, is_first_microbatch: bool | None = None) -> torch.Tensor:
        self.set_activation_dtype(x)
        weights = self._get_weight_tensors()
        return _Multiply.apply(x, splits, self.fuse_wgrad_accumulation, is_first_microbatch, *weights)


class LayerNormLinear(_Multiplies):
    __module__ = "transformer_engine.pytorch.module.layernorm_linear"

    def __init__(self, n: int, fuse_wgrad_accumulation: bool = False, parts: int = 1, dtype: Any = torch.float32):
        self_names = ["weight"] if parts == 1 else [f"weight{i}" for i in range(parts)]
        super().__init__(self_names, (n // parts, n), fuse_wgrad_accumulation, dtype)
        self.weight_names = self_names

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return [getattr(self, name) for name in self.weight_names]


class LayerNormMLP(_Multiplies):
    __module__ = "transformer_engine.pytorch.module.layernorm_mlp"

    def __init__(
        self, n: int, fuse_wgrad_accumulation: bool = False, checkpoint: bool = False, dtype: Any = torch.float32
    ):
        super().__init__(["fc1_weight", "fc2_weight"], (n, n), fuse_wgrad_accumulation, dtype)
        self.checkpoint = checkpoint

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return [self.fc1_weight, self.fc2_weight]


class GroupedLinear(_Multiplies):
    __module__ = "transformer_engine.pytorch.module.grouped_linear"

    def __init__(self, num_gemms: int, n: int, fuse_wgrad_accumulation: bool = False, dtype: Any = torch.float32):
        super().__init__([f"weight{i}" for i in range(num_gemms)], (n, n), fuse_wgrad_accumulation, dtype)
        self.num_gemms = num_gemms

    def _get_weight_tensors(self) -> list[torch.Tensor]:
        return [getattr(self, f"weight{i}") for i in range(self.num_gemms)]


class FusedAdam(torch.optim.Optimizer):
    """AdamW on plain tensors; counts steps by groups, not by parameters."""

    __module__ = "transformer_engine.pytorch.optimizers.fused_adam"

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        use_decoupled_grad: bool = False,
        master_weights: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
    ):
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})
        self.use_decoupled_grad, self.master_weights = use_decoupled_grad, master_weights
        self.exp_avg_dtype, self.exp_avg_sq_dtype = exp_avg_dtype, exp_avg_sq_dtype
        self._scales: dict[Any, dict[str, torch.Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        raise AssertionError("it makes DTensors that are cut evenly")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        raise AssertionError("it makes DTensors that are cut evenly")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                grad = getattr(p, "decoupled_grad", None) if self.use_decoupled_grad else p.grad
                state = self.state[p]
                if not state:
                    for name, dtype in (("exp_avg", self.exp_avg_dtype), ("exp_avg_sq", self.exp_avg_sq_dtype)):
                        state[name] = torch.zeros(p.shape, dtype=dtype)
                        if dtype != torch.float32:
                            self._scales.setdefault(p, {})[name] = torch.ones(1)
                if grad is None:
                    continue
                assert type(p) is nn.Parameter and p.numel()
                assert self.exp_avg_dtype == torch.float32 or "exp_avg" in self._scales[p]
                assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype) == (
                    self.exp_avg_dtype,
                    self.exp_avg_sq_dtype,
                )
                (one, two), n = group["betas"], group["step"]
                m = state["exp_avg"].float().mul_(one).add_(grad.float(), alpha=1 - one)
                v = state["exp_avg_sq"].float().mul_(two).addcmul_(grad.float(), grad.float(), value=1 - two)
                state["exp_avg"].copy_(m)
                state["exp_avg_sq"].copy_(v)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.addcdiv_(m / (1 - one**n), (v / (1 - two**n)).sqrt() + group["eps"], value=-group["lr"])
