"""Writes half_errors.json: errors of PyTorch's own f16 and bf16 results compared with f32, call by call.

    python tests/golden/half_errors.py > tests/golden/half_errors.json
    python tests/golden/half_errors.py FOLDER "gradient #4" "nn.functional.softmin #3" > FOLDER/half_errors.json

The second form takes the golden calls of another folder, and of these only the named ones, if there are names.

PyTorch runs every call of golden.json on the CPU with its f32 tensors rounded to the type, and again in f32 from the
rounded values. The entry is the smallest absolute tolerance with which all results and gradients pass, in addition to
PyTorch's relative tolerance for the type. Entries up to 1e-5 are omitted. Cancelling sums and intermediate roundings
make errors larger than the type's last place. `null` means that PyTorch does not support the call in the type. Written
with PyTorch 2.15; needs safetensors and expecttest.
"""
import json
import math
import os
import sys
import warnings

import torch
from safetensors.torch import load_file
from torch.testing._internal.common_methods_invocations import op_db

warnings.simplefilter("ignore")
here, *named = sys.argv[1:] or [os.path.dirname(os.path.abspath(__file__))]
calls = json.load(open(os.path.join(here, "golden.json")))["calls"]
tensors = load_file(os.path.join(here, "golden.safetensors"))
ops = {(op.name, op.variant_test_name): op for op in op_db}
DTYPES = {"f16": (torch.float16, 1e-3), "bf16": (torch.bfloat16, 1.6e-2)}


def decode(value, leaves):
    """Decodes an argument of golden.json, with the call's tensors by their keys in `leaves`."""
    if isinstance(value, dict):
        if "t" in value:
            return leaves[value["t"]]
        if "l" in value:
            return [decode(v, leaves) for v in value["l"]]
        if "slice" in value:
            return slice(*value["slice"])
        if "dtype" in value:
            return getattr(torch, value["dtype"])
        if "float" in value:
            return float(value["float"])
        return Ellipsis
    return [decode(v, leaves) for v in value] if isinstance(value, list) else value


def tensor_keys(value):
    """Lists the keys of the tensors in an argument."""
    if isinstance(value, dict):
        return [value["t"]] if "t" in value else [k for v in value.get("l", []) for k in tensor_keys(v)]
    return [k for v in value for k in tensor_keys(v)] if isinstance(value, list) else []


def flatten_outputs(out):
    """Lists the values of nested tuples."""
    return [t for o in out for t in flatten_outputs(o)] if isinstance(out, (tuple, list)) else [out]


def run_call(call, cast):
    """Runs a call with its f32 tensors converted by `cast`, and returns its results and gradients."""
    leaves = {}
    for key in tensor_keys(list(call["args"]) + list(call["kwargs"].values())):
        t = tensors[key]
        leaves[key] = (cast(t) if t.dtype == torch.float32 else t.clone()).requires_grad_(key in call.get("grads", {}))
    args = decode(call["args"], leaves)
    kwargs = {k: decode(v, leaves) for k, v in call["kwargs"].items()}
    torch.manual_seed(0)
    op = ops[call["op"], call.get("variant", "")]
    outs = [t for t in flatten_outputs(op(*args, **kwargs)) if isinstance(t, torch.Tensor)]
    grads = []
    if call.get("grads"):
        roots = [outs[i] for i in call["diff_outs"]]
        seeds = [cast(tensors[k]).to(r.dtype) for k, r in zip(call["cotangents"], roots)]
        grads = torch.autograd.grad(roots, [leaves[k] for k in call["grads"]], seeds)
    return [t.detach() for t in [*outs, *grads]]


def smallest_atol(low, exact, rtol):
    """Returns the absolute tolerance that `low` needs in addition to `rtol`."""
    low, exact = low.double(), exact.double()
    excess = (low - exact).abs() - rtol * exact.abs()
    excess = excess[torch.isfinite(exact) & torch.isfinite(low)]
    return excess.max().item() if excess.numel() else 0.0


errors = {name: {} for name in DTYPES}
for call in calls:
    name = call["op"] + ("." + call["variant"] if call.get("variant") else "") + f" #{call['sample']}"
    if named and name not in named:
        continue
    for dtype, (to, rtol) in DTYPES.items():
        try:
            low = run_call(call, lambda t: t.to(to))
            exact = run_call(call, lambda t: t.to(to).float())
        except (RuntimeError, NotImplementedError, KeyError, TypeError):
            errors[dtype][name] = None
            continue
        error = max((smallest_atol(a, b, rtol) for a, b in zip(low, exact) if a.dtype.is_floating_point), default=0.0)
        if error > 1e-5:
            errors[dtype][name] = float(f"{error:.2g}")
print(json.dumps(errors, indent=0).replace("\n", " ").replace('", "', '",\n"').replace(', "', ',\n"'))
