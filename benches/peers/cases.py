"""Recording of test cases, shared by modules.py and architectures.py. A case NAME has these tensors:
    NAME/in/K                  float inputs, which require gradients
    NAME/fixed/K               other inputs
    NAME/state/PARAM           state_dict before the first pass
    NAME/MODE/out/K            results in the modes `train` and `eval`; dropout is off
    NAME/MODE/grad/in/K        gradients of sum over K of sum(out_K * cos(0.7 i + K)), where i is the element's index
    NAME/MODE/grad/PARAM
    NAME/MODE/state/PARAM      state that the pass has changed
"""
import sys
import zlib

import torch
import torch.nn as nn
from safetensors.torch import save_file

torch.set_num_threads(1)
data = {}


def floats(t):
    return t.is_floating_point()


def case(name, module, inputs, call=None, modes=("train",), fixed=()):
    """Records a module or function on inputs; `fixed` lists the inputs without a gradient."""
    torch.manual_seed(zlib.crc32(name.encode()))
    if callable(inputs):
        inputs = inputs()
    if callable(module) and not isinstance(module, nn.Module):
        module = module()
    if isinstance(module, nn.Module):
        for p in module.parameters():
            # Initial ones and zeros would hide mistakes.
            with torch.no_grad():
                p.add_(torch.randn_like(p) * 0.1)
        for n, b in module.named_buffers():
            if floats(b) and b.dim() == 1:
                with torch.no_grad():
                    b.add_(torch.rand_like(b))
        for n, t in module.state_dict().items():
            data[f"{name}/state/{n}"] = t.detach().clone().contiguous()
    for k, x in enumerate(inputs):
        data[f"{name}/{'fixed' if k in fixed or not floats(x) else 'in'}/{k}"] = x.detach().clone().contiguous()
    for mode in modes:
        leaves = [x.detach().clone() for x in inputs]
        for k, x in enumerate(leaves):
            if floats(x) and k not in fixed:
                x.requires_grad_()
        before = {}
        if isinstance(module, nn.Module):
            # Every mode starts from the same state.
            module.load_state_dict({n: data[f"{name}/state/{n}"] for n in module.state_dict()})
            module.train(mode == "train")
            module.zero_grad()
            # All of the state: a pass may change even embeddings (`max_norm`).
            before = {n: t.detach().clone() for n, t in module.state_dict().items()}
        out = call(module, *leaves) if call else module(*leaves)
        out = list(out) if isinstance(out, (tuple, list)) else [out]
        loss = 0
        for k, y in enumerate(out):
            data[f"{name}/{mode}/out/{k}"] = y.detach().clone().contiguous()
            if floats(y) and y.requires_grad:
                i = torch.arange(y.numel(), dtype=torch.float64)
                loss = loss + (y.reshape(-1) * torch.cos(0.7 * i + k).to(y.dtype)).sum()
        if isinstance(loss, torch.Tensor):
            loss.backward()
        for k, x in enumerate(leaves):
            if x.grad is not None:
                data[f"{name}/{mode}/grad/in/{k}"] = x.grad.clone().contiguous()
        if isinstance(module, nn.Module):
            for n, p in module.named_parameters():
                if p.grad is not None:
                    data[f"{name}/{mode}/grad/{n}"] = p.grad.clone().contiguous()
            for n, t in module.state_dict().items():
                if not torch.equal(t, before[n]):
                    data[f"{name}/{mode}/state/{n}"] = t.detach().clone().contiguous()


def save(path):
    """Writes everything that was recorded."""
    path = sys.argv[1] if len(sys.argv) > 1 else path
    save_file(data, path, metadata={"torch": torch.__version__})
    print(f"{path}: {len({n.split('/')[0] for n in data} - {'masks'})} cases, {len(data)} tensors")
