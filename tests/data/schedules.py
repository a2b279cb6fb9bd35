"""Writes schedules.json: the learning rates of PyTorch's schedulers for 40 steps.

    python tests/data/schedules.py > tests/data/schedules.json
"""
import json
import math
import warnings

import torch
from torch.optim import lr_scheduler as s

warnings.simplefilter("ignore")
METRICS = [1 / (1 + t) if t < 6 else 0.2 + 0.01 * math.sin(t) for t in range(40)]


def rates(make, base=0.1):
    opt = torch.optim.SGD([torch.zeros(1, requires_grad=True)], base)
    scheduler = make(opt)
    found = []
    for t in range(40):
        found.append(float(opt.param_groups[0]["lr"]))
        opt.step()
        scheduler.step(METRICS[t]) if isinstance(scheduler, s.ReduceLROnPlateau) else scheduler.step()
    return found


results = {
    "step": rates(lambda o: s.StepLR(o, 7, 0.5)),
    "multi_step": rates(lambda o: s.MultiStepLR(o, [5, 20, 21], 0.3)),
    "constant": rates(lambda o: s.ConstantLR(o, 0.25, 9)),
    "linear": rates(lambda o: s.LinearLR(o, 0.2, 0.9, 13)),
    "exponential": rates(lambda o: s.ExponentialLR(o, 0.93)),
    "polynomial": rates(lambda o: s.PolynomialLR(o, 30, 1.7)),
    "cosine": rates(lambda o: s.CosineAnnealingLR(o, 15, 0.01)),
    "restarts": rates(lambda o: s.CosineAnnealingWarmRestarts(o, 5, 2, 0.01)),
    "restarts_same": rates(lambda o: s.CosineAnnealingWarmRestarts(o, 6)),
    "cyclic": rates(lambda o: s.CyclicLR(o, 0.1, 0.5, 4, 6, cycle_momentum=False)),
    "cyclic2": rates(lambda o: s.CyclicLR(o, 0.1, 0.5, 5, mode="triangular2", cycle_momentum=False)),
    "cyclic_exp": rates(lambda o: s.CyclicLR(o, 0.1, 0.5, 5, mode="exp_range", gamma=0.95, cycle_momentum=False)),
    "one_cycle": rates(lambda o: s.OneCycleLR(o, 0.5, total_steps=41, cycle_momentum=False)),
    "lambda": rates(lambda o: s.LambdaLR(o, lambda t: 1 / (1 + t))),
    "multiplicative": rates(lambda o: s.MultiplicativeLR(o, lambda t: 1 - 1 / (2 + t))),
    "sequential": rates(lambda o: s.SequentialLR(o, [s.LinearLR(o, 0.1, 1.0, 8), s.CosineAnnealingLR(o, 20, 0.01), s.ConstantLR(o, 0.1, 100)], [8, 28])),
    "chained": rates(lambda o: s.ChainedScheduler([s.ConstantLR(o, 0.25, 9), s.ExponentialLR(o, 0.9)])),
    "plateau": rates(lambda o: s.ReduceLROnPlateau(o, "min", 0.5, 3, cooldown=2, min_lr=0.002)),
    "plateau_max": rates(lambda o: s.ReduceLROnPlateau(o, "max", 0.5, 2, threshold=0.005, threshold_mode="abs")),
}
print(json.dumps({"metrics": METRICS, **results}, separators=(",", ":")))
