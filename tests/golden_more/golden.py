"""Adds calls of PyTorch's operator database to the golden data beside it, in the form of tests/golden/README.md.

    pip install torch==2.15.0 numpy safetensors expecttest
    python tests/golden_more/golden.py linalg.qr linalg.eigh=6 gcd=3:int64 mode=4:float32 special.i0e=2:reference unique=6

OPERATION=COUNT:KIND takes that many samples (3 without a number), of the database's `sample_inputs`, in a type if one is named, or of
its `reference_inputs`, or `errors`: what it says that PyTorch refuses. `OPERATION.VARIANT` has one variant only. Samples of many elements are passed over, as are those
of complex numbers. Calls that are there already, by operation, variant and sample, are not added again.
"""
import json
import math
import pathlib
import sys

import torch
from safetensors.torch import load_file, save_file
from torch.testing._internal.common_methods_invocations import op_db

HERE = pathlib.Path(__file__).parent
LARGEST = 600
KINDS = {"float32": 0, "reference": 2000, "int64": 3000, "bool": 4000, "int32": 5000, "uint8": 6000, "float64": 7000, "errors": 12000}


def factors(result):
    """The order of rows in place of the exchanges that lead to it."""
    lu, pivots = result
    return lu, torch.lu_unpack(lu, pivots)[0].argmax(-2)


# What is compared where a result is one of several that are right, or ours has another form.
MADE = {
    "linalg.eigh": lambda r: (r[0], r[1].abs()),
    "linalg.lu_factor": factors,
    "linalg.lstsq": lambda r: r[0],
}

# What PyTorch itself computes less exactly in f32 than the comparison allows: made in f64, and rounded.
EXACT = {"linalg.cond", "linalg.eigh", "linalg.lstsq", "linalg.multi_dot", "matrix_exp", "special.log_ndtr"}


class File:
    def __init__(self):
        self.index = json.loads((HERE / "golden.json").read_text())
        self.tensors = load_file(HERE / "golden.safetensors")
        self.next = 1 + max(int(key.split(":")[0]) for key in self.tensors)
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
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise ValueError(f"{type(value)}")

    def save(self):
        (HERE / "golden.json").write_text(json.dumps(self.index, separators=(",", ":")))
        save_file(self.tensors, HERE / "golden.safetensors")


def fresh(value):
    """The same with leaves of its own."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if isinstance(value, (list, tuple)):
        return [fresh(v) for v in value]
    return value


def double(value):
    """The same in f64, with its history."""
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
    kwargs = {key: fresh(value) for key, value in sample.kwargs.items() if value is not None}
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
    except (ValueError, NotImplementedError, RuntimeError) as error:
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
    return [(s, False) for s in make("cpu", dtype, requires_grad=grad)]


def main():
    file = File()
    for word in sys.argv[1:]:
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
            # From all of the list, and then the others where some are passed over.
            first = [found[i * len(found) // wanted] for i in range(min(wanted, len(found)))]
            for number, (sample, refused) in first + found:
                if made < wanted and add(file, op, KINDS[kind] + number, sample, refused):
                    made += 1
            print(f"{op.name} {op.variant_test_name} {kind}: {made}")
    file.save()


main()
