"""Writes values.json next to this file: second derivatives by PyTorch (CPU, f64), for tests/src/suite/double_backward.rs."""

import json
import pathlib

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def numbers(k, *shape):
    """Multiples of the golden ratio in -1..1, equal to `values` in double_backward.rs."""
    n = 1
    for extent in shape:
        n *= extent
    i = torch.arange(n)
    return (((i * 0.618033988749895 + 0.11 + 0.37 * k) % 1.0) * 2.0 - 1.0).reshape(shape).requires_grad_()


def flat(*tensors):
    return torch.cat([t.detach().flatten() for t in tensors]).tolist()


def gradient_penalty():
    x, w1, b1, w2 = numbers(0, 4, 3), numbers(1, 8, 3), numbers(2, 8), numbers(3, 1, 8)
    score = F.linear(F.silu(F.linear(x, w1, b1)), w2)
    (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
    penalty = ((slope.norm(2, dim=1) - 1.0) ** 2).mean()
    return flat(penalty, *torch.autograd.grad(penalty, [w1, b1, w2]))


def hessian_vector():
    x, classes = numbers(0, 2, 1, 6, 6).detach(), torch.tensor([1, 2])
    w, b, head = numbers(1, 2, 1, 3, 3), numbers(2, 2), numbers(3, 3, 18)

    def loss(w, b, head):
        y = torch.tanh(F.conv2d(x, w, b, padding=1))
        y = F.layer_norm(F.avg_pool2d(y, 2).flatten(1), [18])
        return F.cross_entropy(F.linear(y, head), classes)

    v = (numbers(4, 2, 1, 3, 3), numbers(5, 2), numbers(6, 3, 18))
    value, product = torch.autograd.functional.hvp(loss, (w, b, head), v)
    return flat(value, *product)


def inner_step():
    x, y, w = numbers(0, 6, 4).detach(), numbers(1, 6, 2).detach(), numbers(2, 2, 4)

    def loss(w, x, y):
        return F.mse_loss(torch.sigmoid(F.linear(x, w)), y)

    (slope,) = torch.autograd.grad(loss(w, x[:3], y[:3]), w, create_graph=True)
    after = loss(w - 0.5 * slope, x[3:], y[3:])
    return flat(after, *torch.autograd.grad(after, w))


values = {f.__name__: f() for f in (gradient_penalty, hessian_vector, inner_step)}
path = pathlib.Path(__file__).with_name("values.json")
path.write_text(json.dumps({name: [round(v, 9) for v in found] for name, found in values.items()}, indent=1) + "\n")
