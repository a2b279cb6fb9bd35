"""Writes double.json: exp and log of f64 arguments of all magnitudes, correctly rounded, by mpmath with 60 digits.

Values are strings, because JSON readers may round numbers.

    python tests/data/double.py > tests/data/double.json
"""
import json
import random

from mpmath import mp

mp.dps = 60
rng = random.Random(7)


def pairs(function, arguments):
    return [[repr(x), repr(float(function(mp.mpf(x))))] for x in arguments]


exps = [0.0, 1.0, -1.0, 709.78, -708.3, -740.0, 709.8, -746.0, 0.34657359, -0.34657359, 1e-300, -1e-17, 88.7, 1024.0, -5000.0]
exps += [rng.uniform(-745, 709) for _ in range(300)] + [rng.uniform(-1, 1) for _ in range(200)]
exps += [rng.choice([-1, 1]) * 2.0 ** rng.uniform(-60, 0) for _ in range(60)]
logs = [1.0, 2.0, 0.5, 5e-324, 2.2e-308, 1.7e308, 1 + 2.0**-52, 1 - 2.0**-53, 2.0**512, 2.0**-512, 2.0**64, 2.0**-64, 1.4142135623730951]
logs += [2.0 ** rng.uniform(-1073, 1023) for _ in range(300)] + [rng.uniform(0.5, 2) for _ in range(200)]
logs += [1 + rng.choice([-1, 1]) * 2.0 ** rng.uniform(-50, -2) for _ in range(60)]
print(json.dumps({"exp": [p for p in pairs(mp.exp, exps) if p[1] != "inf"], "log": pairs(mp.log, logs)}, separators=(",", ":")))
