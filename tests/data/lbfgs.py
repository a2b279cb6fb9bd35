"""Writes lbfgs.json: parameters, losses and counts of PyTorch's LBFGS after each of three steps, in f64.

    python tests/data/lbfgs.py > tests/data/lbfgs.json

`bowl` and `valley` are functions of three parameters that begin as cos(0.5 i + k); a fourth one gets no gradient. Here i
is the index of the element, and k of the parameter. `sequence` is PyTorch's example of time-sequence prediction with
fewer units: two LSTM cells and a linear layer, whose parameters begin as 0.4 cos(0.7 i + k).
"""
import json

import torch
from torch import nn

SHAPES = [(4, 6), (7,), (6, 3), (2,)]
STEPS = 3


def index(w):
    return torch.arange(w.numel(), dtype=torch.float64).reshape(w.shape)


def cosine(shape, k, step, scale):
    return scale * torch.cos(step * index(torch.empty(shape)) + k)


def bowl(params):
    """A convex function whose curvature differs between elements."""
    squares = [((1 + index(w) % 5) * (w - torch.sin(index(w) + k)) ** 2).sum() for k, w in enumerate(params)]
    return sum(squares) + sum((w**4).sum() for w in params) * 0.1 + sum(w.sum() for w in params) ** 2 * 0.05


def valley(params):
    """Rosenbrock's function of each parameter."""
    flat = [w.flatten() for w in params]
    return sum((10 * (w[1:] - w[:-1] ** 2) ** 2 + (1 - w[:-1]) ** 2).sum() for w in flat)


def minimise(objective, sign=1, **options):
    params = [cosine(s, k, 0.5, 1).requires_grad_() for k, s in enumerate(SHAPES)]
    optimizer = torch.optim.LBFGS(params, **options)

    def closure():
        optimizer.zero_grad()
        loss = sign * objective(params[:3])
        loss.backward()
        return loss

    return run(optimizer, params, closure)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(1, 6), nn.LSTMCell(6, 6), nn.Linear(6, 1)

    def forward(self, x):
        first = second = (torch.zeros(x.shape[0], 6, dtype=x.dtype),) * 2
        outs = []
        for value in x.split(1, dim=1):
            first = self.lstm1(value, first)
            second = self.lstm2(first[0], second)
            outs.append(self.linear(second[0]))
        return torch.cat(outs, dim=1)


def sequence():
    net = Sequence().double()
    for k, p in enumerate(net.parameters()):
        p.data = cosine(p.shape, k, 0.7, 0.4)
    wave = torch.sin(index(torch.empty(3, 9)) / 2)
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.8, max_iter=4)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(net(wave[:, :-1]), wave[:, 1:])
        loss.backward()
        return loss

    return run(optimizer, list(net.parameters()), closure)


def run(optimizer, params, closure):
    steps = []
    for _ in range(STEPS):
        loss = optimizer.step(closure).item()
        state = optimizer.state[params[0]]
        values = [[float(f"{v:.12g}") for v in p.detach().flatten().tolist()] for p in params]
        steps.append({"loss": loss, "n_iter": state["n_iter"], "func_evals": state["func_evals"], "params": values})
    return steps


wolfe = {"line_search_fn": "strong_wolfe"}
results = {
    "bowl": minimise(bowl, lr=0.5, max_iter=4),
    "bowl wolfe": minimise(bowl, max_iter=4, **wolfe),
    "bowl history": minimise(bowl, lr=0.5, max_iter=4, history_size=2),
    "bowl maximize": minimise(bowl, sign=-1, lr=0.5, max_iter=4, maximize=True),
    "bowl evaluations": minimise(bowl, max_iter=8, max_eval=3, **wolfe),
    "bowl gradient": minimise(bowl, tolerance_grad=0.2, **wolfe),
    "bowl change": minimise(bowl, lr=0.5, tolerance_change=0.05),
    "valley": minimise(valley, lr=0.2, max_iter=6),
    "valley wolfe": minimise(valley, max_iter=6, **wolfe),
    "valley far wolfe": minimise(valley, lr=3, max_iter=6, history_size=3, **wolfe),
    "sequence": sequence(),
}
print(json.dumps(results, separators=(",", ":")))
