"""Adds calls of PyTorch's operator database to the golden calls in this folder, in the format of tests/golden/README.md.

    pip install torch==2.15.0 numpy safetensors expecttest
    python tests/golden_more/golden.py linalg.qr linalg.eigh=6 gcd=3:int64 mode=4:float32 special.i0e=2:reference unique=6

OPERATION=COUNT:KIND takes COUNT samples (3 by default). KIND is a type for the database's `sample_inputs`, `reference` for its
`reference_inputs`, or `errors` for calls that PyTorch rejects. `OPERATION.VARIANT` selects one variant. Samples with many
elements or complex numbers are skipped, as are calls that exist already, by operation, variant and sample.

The environment variable GOLDEN names another folder to add calls to.

`own` instead of an operation adds the calls of `OWN` below, which no sample of the database covers.
"""
import json
import math
import os
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import SampleInput

HERE = pathlib.Path(os.environ.get("GOLDEN", pathlib.Path(__file__).parent))
LARGEST = 600
KINDS = {"float32": 0, "reference": 2000, "int64": 3000, "bool": 4000, "int32": 5000, "uint8": 6000, "float64": 7000, "float16": 8000, "bfloat16": 9000, "errors": 12000}


def factors(result):
    """Replaces the row exchanges by the resulting permutation."""
    lu, pivots = result
    return lu, torch.lu_unpack(lu, pivots)[0].argmax(-2)


# Results to compare where several are correct, or ours has another form.
MADE = {
    "linalg.eigh": lambda r: (r[0], r[1].abs()),
    "linalg.lu_factor": factors,
    "linalg.lstsq": lambda r: r[0],
    "lu": lambda r: (*factors(r[:2]), *r[2:]),
    "linalg.svd": lambda r: (r[0].abs(), r[1], r[2].abs()),
    "svd": lambda r: (r[0].abs(), r[1], r[2].abs()),
    "svd_lowrank": lambda r: (r[0].abs(), r[1], r[2].abs()),
    "pca_lowrank": lambda r: (r[0].abs(), r[1], r[2].abs()),
    # Memory that was not written has no values to compare.
    "empty": torch.zeros_like,
    "empty_like": torch.zeros_like,
    "new_empty": torch.zeros_like,
}

# Keywords that hold a function, which a file cannot. The database passes the default one.
FUNCTIONS = {"distance_function"}

# PyTorch's own f32 results are less exact than the tolerance, so they are computed in f64 and rounded.
EXACT = {"linalg.cond", "linalg.eigh", "linalg.lstsq", "linalg.multi_dot", "matrix_exp", "special.log_ndtr", "linalg.pinv", "pinverse", "linalg.polar", "svd", "linalg.svd", "linalg.svdvals"}


F64, F16, U8, I32 = torch.float64, torch.float16, torch.uint8, torch.int32
WIDE = [1e30, -1e30, 5.3, -5.3, 0.7, -1e-30, 0.0, 7.0, math.inf, math.nan]


def t(values, dtype=torch.float32, grad=True):
    return torch.tensor(values, dtype=dtype, requires_grad=grad and dtype.is_floating_point)


def log_probs():
    values = torch.arange(48.0).mul(0.7).sin().reshape(6, 2, 4).log_softmax(-1)
    return values.detach().requires_grad_()


# Operation, variant, arguments, keywords, and whether PyTorch rejects it. Sample indices start at 14000; append new calls.
OWN = [
    *(case for name in ("fmod", "remainder", "floor_divide") for case in (
        (name, "", lambda: [t(WIDE, F64, False), t([3.0, 7.1, 0.1, 0.1, math.inf, 3.7, 2.0, -0.5, 2.0, 2.0], F64, False)], {}),
        (name, "", lambda: [t(WIDE, F64, False), 3], {}),
    )),
    *(("div", mode + "_rounding", lambda: [t(WIDE, F64, False), t([3.0, 7.1, 0.1, 0.1, math.inf, 3.7, 2.0, -0.5, 2.0, 2.0], F64, False)], {"rounding_mode": mode}) for mode in ("floor", "trunc")),
    ("mul", "", lambda: [t([1.0, -2.5, 0.0], F64), 1e300], {}),
    ("mul", "", lambda: [t([1.0, -2.5, 1e300], F64), 1e-300], {}),
    ("add", "", lambda: [t([1e-50, -2.5e-60], F64), 1e-50], {}),
    ("nan_to_num", "", lambda: [t([math.nan, math.inf, -math.inf, 1.5], F64)], {"nan": 1.5, "posinf": 10.0}),
    ("nan_to_num", "", lambda: [t([1, -2, 3], I32)], {"neginf": 3.0}),
    ("clamp_min", "", lambda: [t([0, 7, 254], U8), -2], {}),
    ("gt", "", lambda: [t([0, 5, 254, 255], U8), -2], {}),
    ("lt", "", lambda: [t([0, 5, 254, 255], U8), 300], {}),
    ("pow", "", lambda: [t([2, -3], I32), -2], {}, "refused"),
    ("sub", "", lambda: [t([2, -3], I32), t([1, 1], I32)], {"alpha": 0.5}, "refused"),
    ("chunk", "", lambda: [torch.zeros(3, 0, requires_grad=True), 4], {"dim": 1}),
    ("var_mean", "", lambda: [torch.zeros(3, 0, requires_grad=True)], {"dim": [0, 1]}),
    ("var", "", lambda: [t([[0.5, 2.0, -1.0], [0.25, 3.0, 1.0]])], {"dim": 1, "correction": 5}),
    ("std", "", lambda: [t([[0.5, 2.0, -1.0], [0.25, 3.0, 1.0]])], {"dim": 1, "correction": 5}),
    ("var", "", lambda: [t([0.5, 2.0, -1.0], F64)], {"dim": 0, "correction": 0.1}),
    ("std", "", lambda: [t([0.5, 2.0, -1.0], F64)], {"dim": 0, "correction": 0.1}),
    ("nn.functional.rms_norm", "", lambda: [t([[1e-4, -2e-4], [1.0, 2.0]], F64), [2]], {}),
    ("nn.functional.cosine_similarity", "", lambda: [t([[0.5, 0.1], [0.02, -0.03]]), t([[0.3, 0.4], [2.0, 1.0]])], {"dim": 1, "eps": 0.1}),
    ("nn.functional.hardswish", "", lambda: [t([-math.inf, -4.0, -1.0, 2.0, 5.0], F64, False)], {}),
    ("nn.functional.interpolate", "nearest", lambda: [t([[[0.0, 1.0, 2.0]]], grad=False)], {"scale_factor": 1.3, "mode": "nearest"}),
    ("nn.functional.interpolate", "nearest", lambda: [t([[[0.0, 1.0, 2.0]]], grad=False)], {"scale_factor": 2.1, "mode": "nearest"}),
    ("nn.functional.interpolate", "nearest", lambda: [t([[[[0.0, 1.0, 2.0]]]], grad=False)], {"scale_factor": 2.1, "mode": "nearest"}),
    ("index_fill", "", lambda: [t(2.0), 0, torch.zeros(0, dtype=torch.int64), 3.0], {}),
    ("slice", "", lambda: [t([[0.0, 1.0, 2.0, 3.0]]), -1, -3, -1, 2], {}),
    ("norm", "", lambda: [t([[1.0, 2.0], [3.0, 4.0]]), "fro"], {"dim": 1, "keepdim": True}),
    ("full", "", lambda: [[2, 3], 4], {}),
    ("max", "reduction_no_dim", lambda: [t([1.0, math.nan, 3.0])], {}),
    ("max", "reduction_no_dim", lambda: [t([[math.nan, math.nan], [3.0, 1.0]])], {}),
    ("min", "reduction_no_dim", lambda: [t([1.0, math.nan, 3.0])], {}),
    ("round", "decimals_neg_3", lambda: [t([12345.0, 1500.0, 2500.0, 60000.0, -500.0], F16)], {"decimals": -3}),
    ("round", "decimals_3", lambda: [t([0.12345, 1.5005, 2.0625, 6.3335, -0.5125], F16)], {"decimals": 3}),
    ("atan2", "", lambda: [t([0.0, 3.0, -2.0, math.inf, 1.0, -0.0]), t([0.0, 0.0, 1.0, 1.0, math.inf, 0.0])], {}),
    ("clamp", "", lambda: [t([-1.0, 0.0, 0.5, 1.0, 2.0])], {"min": 0.0, "max": 1.0}),
    ("clamp", "", lambda: [t([-1.0, 0.0, 0.5, 1.0, 2.0, math.nan]), t([0.0] * 6), t([1.0] * 6)], {}),
    ("clamp", "", lambda: [t([1.5, 0.0, 1.0, 3.0, 0.5]), t([2.0, 1.0, 1.0, 2.0, math.nan]), t([1.0] * 5)], {}),
    ("clamp_min", "", lambda: [t([-1.0, 0.0, 2.0, math.inf])], {"min": 0.0}),
    ("clamp_max", "", lambda: [t([-math.inf, 0.0, 1.0, 2.0])], {"max": 1.0}),
    ("nn.functional.huber_loss", "", lambda: [t([math.inf, 1.0, 5.0, -0.25]), t([0.0, math.inf, 4.0, 0.25])], {"reduction": "sum"}),
    ("nn.functional.smooth_l1_loss", "", lambda: [t([math.inf, 1.0, 5.0, -0.25]), t([0.0, math.inf, 4.0, 0.25])], {"reduction": "sum"}),
    ("nn.functional.margin_ranking_loss", "", lambda: [t([1.0, 0.0, -1.0]), t([0.0, 0.0, 0.0]), t([1.0, 1.0, 1.0], grad=False)], {"reduction": "sum"}),
    ("norm", "inf", lambda: [t([1.0, math.inf, -2.0]), math.inf], {}),
    *(("nn.functional.ctc_loss", "", lambda of=of: [log_probs(), torch.tensor(of), lengths([6, 5]), lengths([2, 1])], {"reduction": how})
      for of in ([[1, 1], [3, 2]], [1, 1, 3]) for how in ("none", "mean", "sum") for lengths in (list, torch.tensor)),
    ("to", "", lambda: [t([1.5, -2.5]), F64], {}),
    ("to", "", lambda: [t([1.5, -2.5]), "cpu", F16, True], {"copy": True}),
    ("to", "", lambda: [t([1.5, -2.5]), t([1], I32)], {}),
    *(("grid_sampler_2d", "", lambda mode=mode, pad=pad: [t([[[[1.0, 2.0, 4.0], [3.0, 0.5, -1.0]]]]), t([[[[0.3, -0.2], [1.4, 0.6]]]]), mode, pad, True], {})
      for mode, pad in ((0, 0), (0, 2), (2, 1))),
    ("tensordot", "", lambda: [t([[1.0, 2.0, 3.0]]), t([[1.0, -1.0], [2.0, 0.5], [4.0, 3.0]])], {"dims": [[0, 1], [1, 0]]}),
    ("nn.functional.softmin", "", lambda: [t([[1.0, 2.0], [0.5, -3.0]]), -1], {"dtype": F64}),
    *(("nn.functional.poisson_nll_loss", "", lambda: [t([0.5, 1.5, 2.0]), t([0.5, 1.0, 4.0])], {"log_input": False, "full": full, "eps": 1e-3, "reduction": how})
      for full in (False, True) for how in ("none", "mean", "sum")),
    ("nn.functional.alpha_dropout", "", lambda: [t([0.5, -1.5, 2.0])], {"p": 1.0, "training": True}),
    ("nn.functional.multi_margin_loss", "", lambda: [t([[0.5, 1.5, 2.0]]), torch.tensor([1])], {"p": 2, "margin": 0.7, "weight": t([1.0, 0.5, 2.0], grad=False), "reduction": "sum"}),
    ("__getitem__", "", lambda: [t([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), [None, slice(None), Ellipsis, -1]], {}),
    ("__getitem__", "", lambda: [t([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), [slice(0, 2), torch.tensor([2, 0, 0])]], {}),
    ("__getitem__", "", lambda: [t([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), torch.tensor([[True, False, True], [False, True, True]])], {}),
    ("nn.functional.dropout2d", "", lambda: [t([[[[1.0, 2.0]], [[3.0, 4.0]]]])], {"p": 0.5}),
    ("nn.functional.dropout3d", "", lambda: [t([[[[[1.0, 2.0]]], [[[3.0, 4.0]]]]])], {"p": 0.5}),
    ("nn.functional.feature_alpha_dropout", "with_train", lambda: [t([[[[1.0, 2.0]], [[3.0, 4.0]]]])], {"p": 0.5, "training": True}),
    ("nn.functional.fractional_max_pool2d", "", lambda: [t([[[[1.0, 5.0, 2.0], [0.5, 3.0, 7.0], [4.0, 6.0, -1.0]]]]), 2],
     {"output_size": 2, "return_indices": True, "_random_samples": t([[[0.3, 0.8]]], grad=False)}),
    # Only the lower triangle counts.
    ("linalg.pinv", "hermitian", lambda: [t([[2.0, 9.0], [1.0, 3.0]], grad=False)], {"hermitian": True}),
]


class File:
    def __init__(self):
        exists = (HERE / "golden.json").exists()
        self.index = json.loads((HERE / "golden.json").read_text()) if exists else {"calls": []}
        self.tensors = load_file(HERE / "golden.safetensors") if exists else {}
        self.next = 1 + max((int(key.split(":")[0]) for key in self.tensors), default=0)
        self.there = {(c["op"], c.get("variant", ""), c["sample"]) for c in self.index["calls"]}

    def keep(self, tensor, kind):
        key = f"{self.next}:{kind}"
        self.next += 1
        self.tensors[key] = tensor.detach().clone().contiguous()
        return key

    def value(self, value, leaves):
        if isinstance(value, torch.Tensor):
            if value.is_complex():
                raise ValueError("complex")
            key = self.keep(value, "in")
            leaves.append((key, value))
            return {"t": key}
        if isinstance(value, (list, tuple)):
            return {"l": [self.value(v, leaves) for v in value]}
        if isinstance(value, slice):
            return {"slice": [value.start, value.stop, value.step]}
        if isinstance(value, torch.dtype):
            return {"dtype": str(value).removeprefix("torch.")}
        if isinstance(value, float) and not math.isfinite(value):
            return {"float": str(value)}
        if value is Ellipsis:
            return {"ellipsis": True}
        if isinstance(value, (torch.memory_format, torch.layout)):
            return str(value)
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ValueError(f"{type(value)}")

    def save(self):
        (HERE / "golden.json").write_text(json.dumps(self.index, separators=(",", ":")))
        save_file(self.tensors, HERE / "golden.safetensors")


def fresh(value):
    """Copies the tensors as new leaves."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [fresh(v) for v in value]
    return value


def double(value):
    """Casts f32 tensors to f64, keeping the history."""
    if isinstance(value, torch.Tensor):
        return value.double() if value.dtype == torch.float32 else value
    return [double(v) for v in value] if isinstance(value, (list, tuple)) else value


def elements(value):
    if isinstance(value, torch.Tensor):
        return value.numel()
    return sum(map(elements, value)) if isinstance(value, (list, tuple)) else 0


def add(file, op, number, sample, refused):
    name, variant = op.name, op.variant_test_name
    if (name, variant, number) in file.there:
        return False
    args = fresh([sample.input, *sample.args])
    kwargs = {key: fresh(value) for key, value in sample.kwargs.items() if value is not None and key not in FUNCTIONS}
    if elements(args) + elements(list(kwargs.values())) > LARGEST:
        return False
    start, tensors, leaves = file.next, dict(file.tensors), []
    call = {"op": name, "variant": variant, "sample": number}
    try:
        call["args"] = [file.value(v, leaves) for v in args]
        call["kwargs"] = {key: file.value(v, leaves) for key, v in kwargs.items()}
        call |= {"outs": [], "out_shapes": []}
        if refused:
            try:
                op(*args, **kwargs)
                raise ValueError("no error")
            except (RuntimeError, IndexError, TypeError) as error:
                call["error"] = str(error).splitlines()[0][:160]
        else:
            given = double(args) if name in EXACT else args
            result = MADE.get(name, lambda r: r)(op(*given, **kwargs))
            if isinstance(result, (bool, int, float, torch.Size)):
                dtype = {torch.Size: torch.int64, float: torch.float64}.get(type(result))
                result = torch.tensor(result, dtype=dtype)
            outs = [result] if isinstance(result, torch.Tensor) else list(result)
            if name in EXACT:
                outs = [out.float() if out.dtype == torch.float64 else out for out in outs]
            if any(out.is_complex() for out in outs):
                raise ValueError("complex")
            call["outs"] = [file.keep(out, "out") for out in outs]
            call["out_shapes"] = [list(out.shape) for out in outs]
            with_grad = [k for k, out in enumerate(outs) if out.requires_grad]
            if with_grad:
                generator = torch.Generator().manual_seed(number)
                seeds = [torch.randn(outs[k].shape, generator=generator, dtype=outs[k].dtype) for k in with_grad]
                inputs = [leaf for leaf in leaves if leaf[1].requires_grad]
                grads = torch.autograd.grad([outs[k] for k in with_grad], [t for _, t in inputs], seeds, allow_unused=True)
                call["cotangents"] = [file.keep(seed, "ct") for seed in seeds]
                call["diff_outs"] = with_grad
                call["grads"] = {key: file.keep(grad, "grad") for (key, _), grad in zip(inputs, grads) if grad is not None}
    except (ValueError, NotImplementedError, RuntimeError, TypeError, AttributeError) as error:
        print(f"passed over: {name} #{number}: {str(error).splitlines()[0][:120]}", file=sys.stderr)
        file.next, file.tensors = start, tensors
        return False
    file.index["calls"].append(call)
    file.there.add((name, variant, number))
    return True


def samples(op, kind):
    if kind == "errors":
        return [(e.sample_input, True) for e in op.error_inputs("cpu")] if op.error_inputs_func else []
    dtype = getattr(torch, kind) if kind in KINDS and kind != "reference" else torch.float32
    make = op.reference_inputs if kind == "reference" else op.sample_inputs
    grad = dtype.is_floating_point and op.supports_autograd
    if dtype not in op.supported_dtypes("cpu"):
        return []
    found = list(make("cpu", dtype, requires_grad=grad))
    for sample in found:
        if sample.kwargs.get("hermitian"):
            # PyTorch's gradient assumes symmetric matrices, though the database's are not.
            lower = sample.input.detach()
            sample.input = (lower.tril() + lower.tril(-1).mT).requires_grad_(grad)
    return [(s, False) for s in found]


def main():
    file = File()
    for word in sys.argv[1:]:
        if word == "own":
            made = 0
            for number, (name, variant, make, kwargs, *refused) in enumerate(OWN):
                op = next(op for op in op_db if (op.name, op.variant_test_name) == (name, variant))
                args = make()
                sample = SampleInput(args[0], args=tuple(args[1:]), kwargs=kwargs)
                made += add(file, op, 14000 + number, sample, bool(refused))
            print(f"own: {made}")
            continue
        name, _, what = word.partition("=")
        count, _, kind = what.partition(":")
        kind = kind or "float32"
        named = [op for op in op_db if name in (op.name, f"{op.name}.{op.variant_test_name}")]
        if not named:
            raise SystemExit(f"the database has no {name}")
        for op in named:
            torch.manual_seed(0)
            made = 0
            found = list(enumerate(samples(op, kind)))
            wanted = int(count or 3)
            # Spread over the whole list, then the others if some are skipped.
            first = [found[i * len(found) // wanted] for i in range(min(wanted, len(found)))]
            for number, (sample, refused) in first + found:
                if made < wanted and add(file, op, KINDS[kind] + number, sample, refused):
                    made += 1
            print(f"{op.name} {op.variant_test_name} {kind}: {made}")
    file.save()


main()
