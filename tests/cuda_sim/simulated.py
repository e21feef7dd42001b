"""A CUDA device without a GPU: tensors that say "cuda", keep torch's rules, and compute on the CPU or hold no data.

``with SimulatedCuda() as gpu:`` makes every tensor on ``device="cuda"`` a :class:`CudaTensor`. CPU and CUDA tensors do
not mix (but for scalars and indices), and ``.numpy()`` of a CUDA tensor fails. Counted, by the line of the library that
asked: host syncs (``gpu.syncs``), copies between host and device (``gpu.copies``), kernels (``gpu.kernels``), the
attention kernels that torch's own C++ picks (``gpu.attention``), bytes live and at most (``gpu.live``, ``gpu.peak``).

``SimulatedCuda(values=False)``: tensors of floats are on the meta device, so an update of a 7B model takes seconds;
integers and masks are real. The process runs under the runtime shim (``shim/``), so that torch believes in the device.

Not seen by it: what a kernel really computes, speed, fragmentation, NCCL.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import weakref
from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

aten = torch.ops.aten
CPU = torch.device("cpu")
LIBRARY = "rlox_grpo"


class CudaTensor(torch.Tensor):
    @staticmethod
    def __new__(cls, inner, device):
        t = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=device,
            requires_grad=False,
        )
        t.inner = inner
        return t

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self):
        return f"CudaTensor({self.inner!r})"

    def tolist(self):
        """Read from the device; torch's own method takes no subclasses."""
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        mode = SimulatedCuda.active
        if mode is None:
            raise RuntimeError(f"{func} on a CUDA tensor outside of SimulatedCuda")
        return mode.run(func, args, kwargs or {})


def on_cuda(t):
    return isinstance(t, CudaTensor)


# Arguments and results of operators are nested lists and tuples at most: torch's pytree takes half of the time here.
def list_tensors(value, found):
    """Append the tensors in ``value`` to ``found``, and return it."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, (list, tuple)):
        for one in value:
            list_tensors(one, found)
    elif isinstance(value, dict):
        for one in value.values():
            list_tensors(one, found)
    return found


def map_tensors(function, value):
    """``value`` with ``function(tensor)`` in the place of each of its tensors."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([map_tensors(function, one) for one in value])
    if isinstance(value, dict):
        return {name: map_tensors(function, one) for name, one in value.items()}
    return value


def take_inner(t):
    return t.inner if isinstance(t, CudaTensor) else t


SYNCING = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.unique_dim.default,
    aten._unique2.default,
    aten.unique_consecutive.default,
    aten.is_nonzero.default,
    aten.equal.default,
    aten.allclose.default,
    aten.repeat_interleave.Tensor,
}
INDEXING = {
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
}
# Attention kernels: forward (out, log-sum-exp, …) and backward, computed by the plain formula.
FUSED = {
    aten._scaled_dot_product_flash_attention.default: "flash",
    aten._scaled_dot_product_efficient_attention.default: "efficient",
    aten._scaled_dot_product_cudnn_attention.default: "cudnn",
}
FUSED_BACKWARD = {
    aten._scaled_dot_product_flash_attention_backward.default: "flash",
    aten._scaled_dot_product_efficient_attention_backward.default: "efficient",
    aten._scaled_dot_product_cudnn_attention_backward.default: "cudnn",
}


VARLEN = {
    aten._flash_attention_forward.default,
    aten._flash_attention_backward.default,
    aten._efficient_attention_forward.default,
    aten._efficient_attention_backward.default,
}


VIEWS = (
    "view",
    "_unsafe_view",
    "expand",
    "transpose",
    "t.",
    "slice",
    "select",
    "unsqueeze",
    "squeeze",
    "detach",
    "alias",
    "permute",
    "as_strided",
    "split",
    "unbind",
    "_reshape_alias",
    "sym_",
    "unfold",
    "diagonal",
)
"""How the names of operators begin that start no kernel."""


class _NoGraph:
    """Stands for ``torch.cuda.CUDAGraph``; a class, because torch's own modules name it in types."""

    def __init__(self, *arguments, **options):
        raise RuntimeError("the simulated device has no kernels to capture")


class SimulatedCuda(TorchDispatchMode):
    active: SimulatedCuda | None = None

    def __init__(self, values=True, watch=LIBRARY, nothing_seen_is_nan=True):
        super().__init__()
        self.values, self.watch, self.nothing_seen_is_nan = values, watch, nothing_seen_is_nan
        self.live = self.peak = 0
        self.kernels, self.syncs, self.copies, self.attention, self.peak_by = (
            Counter(),
            Counter(),
            Counter(),
            Counter(),
            {},
        )
        self.kernels_total, self.operators, self.attention_shapes = 0, Counter(), Counter()
        self.largest_index = 0, ""  # elements of the largest tensor of integers or booleans, and who made it
        self._known = weakref.WeakSet()
        self.record_peak = False

    def __enter__(self):
        SimulatedCuda.active = self
        self._lift = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(…, device="cuda") is made on the host and moved
        self._graph, torch.cuda.CUDAGraph = torch.cuda.CUDAGraph, _NoGraph
        return super().__enter__()

    def __exit__(self, *a):
        # Tensors outlive the mode: what is run on them later goes on being counted.
        torch._C._set_only_lift_cpu_tensors(self._lift)
        torch.cuda.CUDAGraph = self._graph
        return super().__exit__(*a)

    # ------------------------------------------------------------------ bookkeeping
    def where(self):
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_filename
            if f"/{self.watch}/" in name and "simulated" not in name:
                return f"{name.rsplit('/' + self.watch + '/', 1)[1]}:{frame.f_lineno}"
            frame = frame.f_back
        return "elsewhere"

    def _track(self, inner):
        st = inner.untyped_storage()
        if st in self._known:
            return
        self._known.add(st)
        size = st.nbytes()
        self.live += size
        if self.live > self.peak:
            self.peak = self.live
        weakref.finalize(st, self._freed, size)

    def _freed(self, size):
        self.live -= size

    def reset_peak(self):
        self.peak = self.live

    def forget(self):
        """Count anew from here."""
        for counter in (self.kernels, self.syncs, self.copies, self.attention, self.attention_shapes, self.operators):
            counter.clear()
        self.kernels_total, self.largest_index = 0, (0, "")
        self.reset_peak()

    def adopt(self, module):
        """Put a module of the meta device on the simulated one, ties kept; no data."""
        moved = {}
        for owner in module.modules():
            for table in (owner._parameters, owner._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) not in moved:  # what is replaced stays alive, so that no id comes back
                        own = self.wrap(torch.empty_like(tensor.detach(), device="meta"), torch.device("cuda", 0))
                        moved[id(tensor)] = torch.nn.Parameter(own) if name in owner._parameters else own, tensor
                    table[name] = moved[id(tensor)][0]

    def wrap(self, value, device):
        def one(t):
            if isinstance(t, torch.Tensor) and not on_cuda(t):
                if not self.values and t.is_floating_point() and t.device.type != "meta":
                    t = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device="meta")
                self._track(t)
                if not t.is_floating_point() and t.numel() > self.largest_index[0]:
                    self.largest_index = t.numel(), self.where()
                return CudaTensor(t, device)
            return t

        return map_tensors(one, value)

    # ------------------------------------------------------------------ dispatch
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.run(func, args, kwargs or {})

    def run(self, func, args, kwargs):
        if func.namespace == "prim" or func is torch.ops.prim.device.default:
            return (
                func(*map_tensors(take_inner, args), **kwargs)
                if func is not torch.ops.prim.device.default
                else args[0].device
            )
        tensors = list_tensors(kwargs, list_tensors(args, []))
        cuda = [t for t in tensors if on_cuda(t)]
        asked = kwargs.get("device")
        asked = torch.device(asked) if asked is not None else None
        if not cuda and (asked is None or asked.type != "cuda"):
            return func(*args, **kwargs)
        device = asked if asked is not None and asked.type == "cuda" else (cuda[0].device if cuda else asked)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        name = str(func).removeprefix("aten.")

        if func is aten._to_copy.default:
            return self._to_copy(args[0], kwargs)
        if func in (aten.copy_.default,):
            return self._copy_(func, args, kwargs)
        if asked is not None and asked.type == "cpu" and cuda:
            # e.g. new_empty(..., device="cpu"), empty_like(..., device="cpu")
            inner_args = map_tensors(take_inner, args)
            kwargs = dict(kwargs, device=CPU)
            return func(*inner_args, **kwargs)
        # torch's rule
        indices_may_be_host = func in INDEXING
        for t in tensors:
            if (
                not on_cuda(t)
                and t.dim() > 0
                and t.device.type != "meta"
                and not (indices_may_be_host and t is not args[0] and t.dtype in (torch.int64, torch.bool, torch.uint8))
                and cuda
            ):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {device} and cpu! "
                    f"({name} at {self.where()})"
                )
            if on_cuda(t) and t.device != device and t.dim() > 0:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, found {t.device} and {device} ({name})"
                )
        self._count(func, name, args)
        if func in FUSED:
            return self._attention(FUSED[func], func, args, kwargs, device)
        if func in FUSED_BACKWARD:
            return self._attention_backward(FUSED_BACKWARD[func], func, args, kwargs, device)
        if func in VARLEN:
            return self._varlen(func, args, kwargs, device)
        inner_args, inner_kwargs = self._inner(func, args), self._inner(func, kwargs)
        if asked is not None:
            inner_kwargs["device"] = CPU if self.values else ("meta" if self._makes_floats(func, args, kwargs) else CPU)
        out = self._call(func, inner_args, inner_kwargs)
        if func is aten._local_scalar_dense.default:
            return out
        out = self.wrap(out, device)
        return return_and_correct_aliasing(func, args, kwargs, out)

    def _makes_floats(self, func, args, kwargs):
        dtype = kwargs.get("dtype")
        if dtype is not None:
            return dtype.is_floating_point
        if like := list_tensors(args, []):
            return like[0].is_floating_point()
        if func in (aten.arange.default, aten.arange.start, aten.arange.start_step):
            return any(isinstance(a, float) for a in args)
        if func in (aten.full.default, aten.scalar_tensor.default):
            return isinstance(args[-1], float)
        return True

    def _inner(self, func, value):
        """The tensors inside; where one of them has no data, none has."""
        if self.values or not any(take_inner(t).device.type == "meta" for t in list_tensors(value, [])):
            return map_tensors(take_inner, value)
        if func in INDEXING:  # masks say how many: make them indices first
            args = list(value) if isinstance(value, (tuple, list)) else value
            if isinstance(args, list) and len(args) > 1:
                new = []
                for index in args[1]:
                    i = take_inner(index) if index is not None else None
                    if i is not None and i.dtype == torch.bool:
                        new += [n.to("meta") for n in i.nonzero(as_tuple=True)]
                    else:
                        new.append(i if i is None or i.device.type == "meta" else i.to("meta"))
                args[1] = new
                args = [args[0], args[1], *args[2:]]
                return tuple(
                    map_tensors(lambda t: take_inner(t).to("meta"), a) if n != 1 else a for n, a in enumerate(args)
                )
        return map_tensors(lambda t: take_inner(t).to("meta"), value)

    def _call(self, func, args, kwargs):
        if func in (aten.mm.dtype, aten.mm.dtype_out):  # kernels of CUDA alone
            left, right, dtype = args
            return torch.mm(left.to(dtype), right.to(dtype), **kwargs)
        if self.values:
            return func(*args, **kwargs)
        bare = any(t.device.type == "meta" for t in list_tensors(kwargs, list_tensors(args, [])))
        if bare and func is aten._local_scalar_dense.default:
            t = args[0]
            return {torch.bool: True}.get(t.dtype, 1 if not t.dtype.is_floating_point else 1.0)
        if bare and func in (aten.allclose.default, aten.equal.default, aten.is_nonzero.default):
            return True
        if bare and "fused_adam" in str(func):
            return None
        if bare and func is aten.masked_scatter.default:
            return torch.empty_like(args[0], device="meta")
        out = func(*args, **kwargs)
        if bare:  # comparisons of floats: true, as what is not finite would stop the library

            def back(t):
                if t.device.type == "meta" and not t.is_floating_point():
                    make = torch.ones if t.dtype == torch.bool else torch.zeros
                    return make(t.shape, dtype=t.dtype)
                return t

            return map_tensors(back, out)
        return out

    def _count(self, func, name, args):
        where = self.where()
        if not name.startswith(VIEWS):
            self.operators[name] += 1
            self.kernels[where] += 1
            self.kernels_total += 1
        waits = func in SYNCING
        if func in INDEXING:
            waits = any(
                isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) and on_cuda(i) for i in args[1]
            )
            if any(isinstance(i, torch.Tensor) and not on_cuda(i) for i in args[1]):
                self.copies[f"{where} indices H2D"] += 1
        if waits:
            self.syncs[f"{where} {name}"] += 1

    def _to_copy(self, t, kwargs):
        target = kwargs.get("device")
        target = torch.device(target) if target is not None else t.device
        if target.type == "cuda" and target.index is None:
            target = torch.device("cuda", torch.cuda.current_device())
        rest = {k: v for k, v in kwargs.items() if k in ("dtype", "memory_format", "layout")}
        inner = t.inner if on_cuda(t) else t
        where = self.where()
        if on_cuda(t) and target.type == "cpu":
            self.syncs[f"{where} D2H copy"] += 1
            self.copies[f"{where} D2H"] += 1
            if inner.device.type == "meta":
                return torch.zeros(inner.shape, dtype=kwargs.get("dtype") or inner.dtype)
            return aten._to_copy.default(inner, **rest)
        if not on_cuda(t) and target.type == "cuda":
            self.copies[f"{where} H2D"] += 1
        else:
            self.kernels[where] += 1
            self.kernels_total += 1
        out = aten._to_copy.default(inner, **rest)
        if not self.values and out.device.type == "meta" and not out.is_floating_point():
            out = torch.ones(out.shape, dtype=out.dtype)
        return self.wrap(out, target)

    def _copy_(self, func, args, kwargs):
        dst, src = args[0], args[1]
        where = self.where()
        if on_cuda(dst) != on_cuda(src):
            host = src if on_cuda(dst) else dst
            asynchronous = bool(args[2] if len(args) > 2 else kwargs.get("non_blocking")) and host.is_pinned()
            how = " page-locked, not waiting" if asynchronous else ""
        if on_cuda(dst) and not on_cuda(src) and src.dim():
            self.copies[f"{where} H2D{how}"] += 1
        elif on_cuda(src) and not on_cuda(dst):
            self.copies[f"{where} D2H{how}"] += 1
            if not asynchronous:
                self.syncs[f"{where} D2H copy"] += 1
        else:
            self.kernels[where] += 1
            self.kernels_total += 1
        d, s = (x.inner if on_cuda(x) else x for x in (dst, src))
        if d.device.type == "meta" or s.device.type == "meta":
            if d.device.type == "meta":
                aten.copy_.default(d, s if s.device.type == "meta" else s.to("meta"))
            return dst
        aten.copy_.default(d, s)
        return dst

    # ------------------------------------------------------------------ fused attention by the plain formula
    def _plain(self, q, k, v, mask, causal, scale):
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = (q.double() @ k.double().transpose(-1, -2)) * (scale if scale is not None else q.shape[-1] ** -0.5)
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        weights = scores.softmax(-1)
        if not self.nothing_seen_is_nan:  # kernels differ in what a query gives that sees no key
            weights = weights.nan_to_num(0)
        return (weights @ v.double()).to(q.dtype), scores.logsumexp(-1).float()

    def _plain_backward(self, grad, q, k, v, mask, causal, scale):
        group, scale = q.shape[1] // k.shape[1], scale if scale is not None else q.shape[-1] ** -0.5
        q_, k_, v_, g = (
            q.double(),
            k.double().repeat_interleave(group, 1),
            v.double().repeat_interleave(group, 1),
            grad.double(),
        )
        scores = (q_ @ k_.transpose(-1, -2)) * scale
        if causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
        p = scores.softmax(-1).nan_to_num(0)
        of_p = g @ v_.transpose(-1, -2)
        of_s = p * (of_p - (of_p * p).sum(-1, keepdim=True)) * scale

        def summed(t):
            return t.view(t.shape[0], -1, group, *t.shape[2:]).sum(2)

        return [
            (of_s @ k_).to(q.dtype),
            summed(of_s.transpose(-1, -2) @ q_).to(k.dtype),
            summed(p.transpose(-1, -2) @ g).to(v.dtype),
        ]

    def _parse(self, func, args, kwargs):
        names = [a.name for a in func._schema.arguments]
        given = dict(zip(names, args, strict=False)) | dict(kwargs)
        for a in func._schema.arguments:
            if a.name not in given:
                given[a.name] = a.default_value
        return given

    def _attention(self, kind, func, args, kwargs, device):
        given = self._parse(func, args, kwargs)
        q, k, v = (given[n].inner for n in ("query", "key", "value"))
        mask = given.get("attn_bias")
        self.attention[
            f"{self.where()} {kind}{' masked' if mask is not None else ''}{' causal' if given['is_causal'] else ''}"
            f" q={tuple(q.shape)} kv={tuple(k.shape)} {str(q.dtype)[6:]}"
        ] += 1
        if q.device.type == "meta":
            out = torch.empty(q.shape[0], q.shape[2], q.shape[1], v.shape[-1], dtype=q.dtype, device="meta").transpose(
                1, 2
            )
            lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
        else:
            out, lse = self._plain(
                q, k, v, None if mask is None else mask.inner, given["is_causal"], given.get("scale")
            )
        out, lse = self.wrap((out, lse), device)
        seed = self.wrap(torch.zeros((), dtype=torch.int64), device)
        returns = len(func._schema.returns)
        if kind == "efficient":
            return out, lse, seed, seed
        filled = [out, lse] + [None] * (returns - 2)
        for n, r in enumerate(func._schema.returns[2:], 2):
            kindname = str(r.type)
            filled[n] = q.shape[2] if "int" in kindname.lower() or "sym" in kindname.lower() else seed
        return tuple(filled)

    # ------------------------------------------------------------------ variable-length attention, sequence by sequence
    def _varlen(self, func, args, kwargs, device):
        given = self._parse(func, args, kwargs)
        flash, backward = "flash" in str(func), "backward" in str(func)
        q, k, v = (given[name].inner for name in ("query", "key", "value"))
        if flash:
            if q.dtype not in (torch.float16, torch.bfloat16):
                raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
            if torch.cuda.get_device_capability() < (8, 0):
                raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
            cu_q, cu_k, causal = given["cum_seq_q"], given["cum_seq_k"], given["is_causal"]
            left = given.get("window_size_left")
            window = None if left is None or left < 0 else left + 1
        else:
            q, k, v = q[0], k[0], v[0]
            if q.shape[1] != k.shape[1]:
                raise RuntimeError("the memory-efficient kernel takes as many key heads as query heads")
            cu_q, cu_k, causal = given["cu_seqlens_q"], given["cu_seqlens_k"], given["custom_mask_type"] == 2
            window = given.get("window_size")
        name = f"varlen {'flash' if flash else 'efficient'}{' backward' if backward else ''}"
        self.attention[f"{self.where()} {name}"] += 1
        self.attention_shapes[name, tuple(q.shape), tuple(k.shape), given.get("max_k", given.get("max_seqlen_k"))] += 1
        longest = given.get("max_q", given.get("max_seqlen_q"))
        width = -(-int(longest) // 32) * 32
        count = cu_q.shape[0] - 1
        state = self.wrap(torch.zeros(2, dtype=torch.int64), device)
        if q.device.type == "meta":
            if backward:
                grads = [torch.empty_like(tensor) for tensor in (q, k, v)]
                grads = grads if flash else [grad[None] for grad in grads]
                return (*self.wrap(grads, device), *(() if flash else (None,)))
            shape = (q.shape[1], q.shape[0]) if flash else (count, q.shape[1], width)
            lse = torch.empty(shape, dtype=torch.float32, device="meta")
            out = torch.empty(q.shape, dtype=q.dtype, device="meta")
        else:
            bounds = [list(itertools.pairwise(tensor.inner.tolist())) for tensor in (cu_q, cu_k)]
            used = given.get("seqused_k") if flash else given.get("seqlen_k")
            if used is not None:  # keys of a sequence that count, from where it begins
                counts = used.inner.tolist()
                bounds[1] = [(start, start + count) for (start, _), count in zip(bounds[1], counts, strict=True)]
            scale = given["scale"] if given.get("scale") is not None else q.shape[-1] ** -0.5
            if backward:
                grads = self._varlen_backward(given, (q, k, v), bounds, causal, window, scale, flash)
                grads = grads if flash else [grad[None] for grad in grads]
                return (*self.wrap(grads, device), *(() if flash else (None,)))
            out, lse = torch.empty_like(q), torch.empty(q.shape[1], q.shape[0])
            for rows, keys, scores in self._sequences(q, k, bounds, causal, window, scale):
                values = v[keys].double().repeat_interleave(q.shape[1] // v.shape[1], 1)
                part = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0), values)
                out[rows], lse[:, rows] = part.to(q.dtype), scores.logsumexp(-1).float()
            if not flash:
                padded = torch.full((count, q.shape[1], width), torch.inf)
                for n, (start, stop) in enumerate(bounds[0]):
                    padded[n, :, : stop - start] = lse[:, start:stop]
                lse = padded
        if flash:
            return (*self.wrap((out, lse), device), state, state, state)
        return (*self.wrap((out[None], lse), device), state, state, int(longest), int(longest))

    @staticmethod
    def _sequences(q, k, bounds, causal, window, scale):
        """Each sequence's queries, keys and float64 scores ``[H, Q, K]``, −inf where a query does not see a key."""
        for (q0, q1), (k0, k1) in zip(*bounds, strict=True):
            keys = k[k0:k1].double().repeat_interleave(q.shape[1] // k.shape[1], 1)
            scores = torch.einsum("qhd,khd->hqk", q[q0:q1].double(), keys) * scale
            seen = torch.ones(scores.shape[1:], dtype=torch.bool)
            seen = seen.tril(k1 - k0 - (q1 - q0)) if causal else seen
            seen = seen if window is None else seen.triu(k1 - k0 - (q1 - q0) - window + 1)
            yield slice(q0, q1), slice(k0, k1), scores.masked_fill(~seen, -torch.inf)

    def _varlen_backward(self, given, qkv, bounds, causal, window, scale, flash):
        """Gradients by the output and log-sum-exp that were given, as the kernels compute them."""
        q, k, v = qkv
        grad_out = given.get("grad_out", given.get("grad_out_")).inner
        out, lse = given["out"].inner, given["logsumexp"].inner
        grad_out, out = (grad_out, out) if flash else (grad_out[0], out[0])
        grads = [torch.zeros_like(tensor) for tensor in qkv]
        group = q.shape[1] // k.shape[1]
        for n, (rows, keys, scores) in enumerate(self._sequences(q, k, bounds, causal, window, scale)):
            own = lse[:, rows] if flash else lse[n, :, : rows.stop - rows.start]
            weights = (scores - own.double()[..., None]).exp()
            repeated = [tensor[keys].double().repeat_interleave(group, 1) for tensor in (k, v)]
            grad, result = grad_out[rows].double(), out[rows].double()
            of_weights = torch.einsum("qhd,khd->hqk", grad, repeated[1])
            of_scores = weights * (of_weights - (grad * result).sum(-1).t()[..., None]) * scale
            parts = (
                torch.einsum("hqk,khd->qhd", of_scores, repeated[0]),
                torch.einsum("hqk,qhd->khd", of_scores, q[rows].double()).unflatten(1, (-1, group)).sum(2),
                torch.einsum("hqk,qhd->khd", weights, grad).unflatten(1, (-1, group)).sum(2),
            )
            for total, place, part in zip(grads, (rows, keys, keys), parts, strict=True):
                total[place] += part.to(total.dtype)
        return grads

    def _attention_backward(self, kind, func, args, kwargs, device):
        given = self._parse(func, args, kwargs)
        grad = given.get("grad_out", given.get("grad_out_")).inner
        q, k, v = (given[n].inner for n in ("query", "key", "value"))
        mask = given.get("attn_bias")
        if q.device.type == "meta":
            grads = [torch.empty_like(t) for t in (q, k, v)]
        else:
            grads = self._plain_backward(
                grad, q, k, v, None if mask is None else mask.inner, given["is_causal"], given.get("scale")
            )
        grads = list(self.wrap(grads, device))
        if kind == "efficient":
            grads.append(None)
        return tuple(grads)


def to_cuda(module, dtype=None):
    """Put a module's parameters and buffers on the pretended device, ties kept; inside ``with SimulatedCuda()``."""
    memo = {}
    for m in module.modules():
        for table in (m._parameters, m._buffers):
            for name, t in table.items():
                if t is None or on_cuda(t):
                    continue
                if id(t) not in memo:
                    moved = t.detach().to("cuda", dtype if t.is_floating_point() else None)
                    memo[id(t)] = (
                        torch.nn.Parameter(moved, requires_grad=t.requires_grad)
                        if isinstance(t, torch.nn.Parameter)
                        else moved
                    )
                    memo[id(t), "kept"] = t
                table[name] = memo[id(t)]
    return module


@contextlib.contextmanager
def swapping_parameters():
    """``module.to("cuda")`` works on the pretended device."""
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)
