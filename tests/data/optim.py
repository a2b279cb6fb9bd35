"""Writes optim.json: parameters after 20 steps of each optimiser, by PyTorch in f64; Lion and LAMB by their papers, in numpy.

With the argument `states`, writes PyTorch's state and parameters after ten of these steps.

    python tests/data/optim.py > tests/data/optim.json
    python tests/data/optim.py states > tests/data/optim_states.json

Three parameters begin as cos(0.5 i + k) and get the gradients sin(1.7 i + 0.9 t + k) (1 + 0.3 w). Here i is the index of the
element, k of the parameter, and t of the step, from 1. The learning rate is halved after ten steps, except for ASGD, where
PyTorch applies it one step late. Muon computes in bf16, as in PyTorch.
"""
import json
import sys

import numpy as np
import torch

SHAPES = [(4, 6), (7,), (6, 3)]
STEPS = 20


def begin():
    return [np.cos(0.5 * np.arange(np.prod(s)) + k).reshape(s) for k, s in enumerate(SHAPES)]


def gradient(w, k, t):
    return np.sin(1.7 * np.arange(w.size) + 0.9 * t + k).reshape(w.shape) * (1 + 0.3 * w)


def by_torch(make):
    return [p.detach().double().flatten().tolist() for p in steps(make, STEPS)[0]]


def steps(make, count):
    params = [torch.tensor(w, requires_grad=True) for w in begin()]
    opt = make(params)
    for t in range(1, count + 1):
        if t == 11 and not isinstance(opt, torch.optim.ASGD):
            for group in opt.param_groups:
                group["lr"] *= 0.5
        for k, p in enumerate(params):
            p.grad = None if not any(p is q for g in opt.param_groups for q in g["params"]) else torch.tensor(gradient(p.detach().numpy(), k, t))
        opt.step()
    return params, opt


def rounded(values):
    return [float(f"{v:.9g}") for v in torch.as_tensor(values).detach().double().flatten().tolist()]


def state_of(make):
    params, opt = steps(make, 10)
    kept = {f"{k}.{name}": rounded(v) for k, state in opt.state_dict()["state"].items() for name, v in state.items()}
    return kept | {f"p{k}": rounded(p) for k, p in enumerate(params)}


def by_hand(step, lr):
    params, states = begin(), [{} for _ in SHAPES]
    for t in range(1, STEPS + 1):
        params = [step(w, gradient(w, k, t), states[k], lr if t <= 10 else lr / 2, t) for k, w in enumerate(params)]
    return [w.flatten().tolist() for w in params]


def lion(w, g, s, lr, t, b1=0.9, b2=0.99, decay=0.1):
    m = s.get("m", np.zeros_like(w))
    s["m"] = b2 * m + (1 - b2) * g
    return w - lr * (np.sign(b1 * m + (1 - b1) * g) + decay * w)


def lamb(w, g, s, lr, t, b1=0.9, b2=0.999, eps=1e-6, decay=0.01):
    s["m"] = b1 * s.get("m", 0) + (1 - b1) * g
    s["v"] = b2 * s.get("v", 0) + (1 - b2) * g * g
    r = s["m"] / (1 - b1**t) / (np.sqrt(s["v"] / (1 - b2**t)) + eps) + decay * w
    return w - lr * np.linalg.norm(w) / np.linalg.norm(r) * r


o = torch.optim
groups = lambda make: lambda p: make([{"params": p[:1]}, {"params": p[1:2], "lr": 0.05}, {"params": p[2:], "weight_decay": 0.3}])
if sys.argv[1:] == ["states"]:
    of = {
        "sgd": lambda p: o.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, maximize=True),
        "muon": lambda p: o.Muon(p[::2], 0.05),
        "adam": lambda p: o.Adam(p, 0.02, weight_decay=0.1),
        "rmsprop": lambda p: o.RMSprop(p, 0.01, momentum=0.5, centered=True),
        "adagrad": lambda p: o.Adagrad(p, 0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.2),
        "adadelta": lambda p: o.Adadelta(p, 1.0, weight_decay=0.1),
        "adamax": lambda p: o.Adamax(p, 0.02, weight_decay=0.1),
        "nadam": lambda p: o.NAdam(p, 0.02, weight_decay=0.1),
        "radam": lambda p: o.RAdam(p, 0.02, weight_decay=0.1),
        "asgd": lambda p: o.ASGD(p, 0.1, lambd=0.01, weight_decay=0.1),
        "rprop": lambda p: o.Rprop(p, 0.05),
        "adafactor": lambda p: o.Adafactor(p, 0.1, eps=(2.0**-23, 1e-3), weight_decay=0.1),
    }
    print(json.dumps({name: state_of(make) for name, make in of.items()}, separators=(",", ":")))
    sys.exit()
results = {
    "sgd": by_torch(lambda p: o.SGD(p, 0.1, momentum=0.9, weight_decay=0.1, maximize=True)),
    "sgd groups": by_torch(groups(lambda p: o.SGD(p, 0.1, momentum=0.9))),
    "adam": by_torch(lambda p: o.Adam(p, 0.02, weight_decay=0.1)),
    "adamw groups": by_torch(groups(lambda p: o.AdamW(p, 0.02))),
    "rmsprop": by_torch(lambda p: o.RMSprop(p, 0.01, momentum=0.5, centered=True)),
    "adagrad": by_torch(lambda p: o.Adagrad(p, 0.1, lr_decay=0.01, weight_decay=0.1, initial_accumulator_value=0.2)),
    "adadelta": by_torch(lambda p: o.Adadelta(p, 1.0, weight_decay=0.1)),
    "adamax": by_torch(lambda p: o.Adamax(p, 0.02, weight_decay=0.1)),
    "nadam": by_torch(lambda p: o.NAdam(p, 0.02, weight_decay=0.1)),
    "nadam decoupled": by_torch(lambda p: o.NAdam(p, 0.02, weight_decay=0.1, decoupled_weight_decay=True, momentum_decay=0.1)),
    "radam": by_torch(lambda p: o.RAdam(p, 0.02, weight_decay=0.1)),
    "radam decoupled": by_torch(lambda p: o.RAdam(p, 0.02, betas=(0.8, 0.9), weight_decay=0.1, decoupled_weight_decay=True)),
    "asgd": by_torch(lambda p: o.ASGD(p, 0.1, lambd=0.01, weight_decay=0.1)),
    "rprop": by_torch(lambda p: o.Rprop(p, 0.05)),
    "adafactor": by_torch(lambda p: o.Adafactor(p, 0.1, eps=(2.0**-23, 1e-3), weight_decay=0.1)),
    "adafactor far": by_torch(lambda p: o.Adafactor(p, 2.0, beta2_decay=-0.5, eps=(2.0**-23, 1e-3), maximize=True)),
    "muon": by_torch(lambda p: o.Muon(p[::2], 0.05)),
    "muon rms": by_torch(lambda p: o.Muon(p[::2], 0.05, nesterov=False, adjust_lr_fn="match_rms_adamw", weight_decay=0.0)),
    "lion": by_hand(lion, 0.02),
    "lamb": by_hand(lamb, 0.02),
}
print(json.dumps({name: [[float(f"{v:.9g}") for v in p] for p in found] for name, found in results.items()}, separators=(",", ":")))
