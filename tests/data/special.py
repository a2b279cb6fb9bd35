"""Writes special.json: special functions of small and large f32 arguments, by mpmath with 50 digits.

    python tests/data/special.py > tests/data/special.json
"""
import json
import math
import random
import struct

from mpmath import mp

mp.dps = 50
rng = random.Random(11)


def single(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def both(low, high, count):
    return [single(rng.choice([-1, 1]) * rng.uniform(low, high)) for _ in range(count)]


def powers(low, high, count):
    return [single(rng.choice([-1, 1]) * 10.0 ** rng.uniform(low, high)) for _ in range(count)]


def log_ndtr(x):
    return mp.log(mp.erfc(-x / mp.sqrt(2)) / 2)


def ndtri(p):
    with mp.workdps(80):
        y = mp.mpf(0)
        if p < mp.mpf("1e-3"):
            y = -mp.sqrt(-2 * mp.log(p))
        for _ in range(60):
            phi = mp.erfc(-y / mp.sqrt(2)) / 2
            # Applied to the logarithm, which is nearly quadratic in the tail.
            y -= (mp.log(phi) - mp.log(p)) * phi * mp.sqrt(2 * mp.pi) * mp.exp(y * y / 2)
        return y


bessel = [0.0] + both(0, 8, 40) + both(7.5, 8.5, 10) + both(8, 25, 30) + both(20, 85, 30) + powers(-6, 0, 20)
tails = both(0, 1, 40) + both(0.3, 2, 40) + both(0, 9, 40) + powers(-6, 0, 20)
far = [single(rng.uniform(9, 100)) for _ in range(20)] + [single(10.0 ** rng.uniform(2, 18)) for _ in range(20)]
chances = [single(10.0 ** rng.uniform(-37, -1)) for _ in range(60)] + [single(rng.uniform(0, 1)) for _ in range(60)] + [0.1, 0.5, single(1 - 2.0**-24)]
found = {
    "i0": [(x, mp.besseli(0, x)) for x in bessel],
    "i1": [(x, mp.besseli(1, x)) for x in bessel],
    "i0e": [(x, mp.besseli(0, x) * mp.exp(-abs(x))) for x in map(mp.mpf, bessel + far)],
    "i1e": [(x, mp.besseli(1, x) * mp.exp(-abs(x))) for x in map(mp.mpf, bessel + far)],
    "erfcx": [(x, mp.exp(x * x) * mp.erfc(x)) for x in map(mp.mpf, tails + far[:20])],
    "log_ndtr": [(x, log_ndtr(x)) for x in map(mp.mpf, tails + [-x for x in far[:20]])],
    "ndtri": [(single(p), ndtri(mp.mpf(single(p)))) for p in chances],
    "zeta of 2.5": [(q, mp.zeta(mp.mpf(2.5), q)) for q in [single(10.0 ** rng.uniform(-6, 6)) for _ in range(60)]],
    "zeta of 1.0625": [(q, mp.zeta(mp.mpf(1.0625), q)) for q in [single(10.0 ** rng.uniform(-3, 6)) for _ in range(40)]],
    "zeta of 30": [(q, mp.zeta(mp.mpf(30), q)) for q in [single(10.0 ** rng.uniform(-1, 1)) for _ in range(40)]],
}
rows = {name: [[float(x), float(y)] for x, y in pairs if 1e-37 < abs(y) < 1e38 or x == 0] for name, pairs in found.items()}
assert all(math.isfinite(y) for pairs in rows.values() for _, y in pairs)
print(json.dumps(rows, separators=(",", ":")))
