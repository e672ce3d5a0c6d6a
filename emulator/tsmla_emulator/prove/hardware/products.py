"""Runs products of matrices, matrix loads and stores, and special functions on a GPU, and compares the emulator.

    python -m tsmla_emulator.prove.hardware.products record DIRECTORY --commit HASH
    python -m tsmla_emulator.prove.hardware.products compare DIRECTORY

The kernels of products.cu are compiled by nvcc; a record holds the image that ran, which the emulator runs, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from ...run.machine import Launch, Options, Region, run_launches
from ...run.sass.program import machine_code_module
from .opcodes import Driver

SOURCE = Path(__file__).with_name("products.cu")
CASES = 96
_SPECIAL_CTAS, _SPECIAL_THREADS = 1024, 128


@dataclasses.dataclass(frozen=True)
class Format:
    """A floating-point format. nothing: whether the largest exponent is that of NaN and infinity only."""

    exponent: int
    mantissa: int
    nothing: bool = True

    @property
    def bias(self) -> int:
        return (1 << self.exponent - 1) - 1


FORMATS = {"bf16": Format(8, 7), "f16": Format(5, 10), "e4m3": Format(4, 3, False), "e5m2": Format(5, 2)}
_FLOAT = Format(8, 23)


@dataclasses.dataclass(frozen=True)
class Product:
    """A kernel of products.cu: formats of both factors, rows of a case, products on top of each other."""

    name: str
    a: str
    b: str
    rows: int = 64
    steps: int = 1

    @property
    def threads(self) -> int:
        return 2 * self.rows


PRODUCTS = [
    *(
        Product(f"wgmma_{name}{ending}", *formats, steps=steps)
        for name, formats in {
            "bf16": ("bf16", "bf16"), "f16": ("f16", "f16"), "e4m3": ("e4m3", "e4m3"), "e5m2": ("e5m2", "e5m2"),
            "e4m3_e5m2": ("e4m3", "e5m2"),
        }.items()
        for ending, steps in (("", 1), ("_four", 4))
    ),
    Product("mma_bf16", "bf16", "bf16", rows=16),
    Product("mma_f16", "f16", "f16", rows=16),
]  # fmt: skip


def _drawn(source: np.random.Generator, of: Format, shape: tuple[int, ...], low: int, high: int) -> np.ndarray:
    """Return numbers with exponents from low to high, relative to 1's, as far as the format goes."""
    most = (1 << of.exponent) - (2 if of.nothing else 1)
    low, high = (min(max(x + of.bias, 0), most) for x in (low, high))
    exponent = source.integers(low, high + 1, shape, np.uint32)
    mantissa = source.integers(0, 1 << of.mantissa, shape, np.uint32)
    if not of.nothing:  # e4m3's NaN
        mantissa -= (exponent == most) & (mantissa == (1 << of.mantissa) - 1)
    sign = source.integers(0, 2, shape, np.uint32)
    return sign << of.exponent + of.mantissa | exponent << of.mantissa | mantissa


def factors(product: Product) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return A [cases, steps, rows, K] and B [cases, steps, 8, K] as bits, and C [cases, rows, 8].

    Cases take turns: exponents near each other; far apart; most numbers 0; products that cancel; any bits; small ones.
    """
    source = np.random.Generator(np.random.PCG64(len(product.name) + sum(map(ord, product.name))))
    a_format, b_format = FORMATS[product.a], FORMATS[product.b]
    bits = 1 + a_format.exponent + a_format.mantissa
    depth = 256 // bits
    kind = {8: np.uint8, 16: np.uint16}[bits]
    a_shape, b_shape = (product.steps, product.rows, depth), (product.steps, 8, depth)
    c_shape = (product.rows, 8)
    all_a, all_b, all_c = [], [], []
    for case in range(CASES):
        way = case % 6
        low, high = {0: (-2, 2), 1: (-12, 12), 2: (-12, 12), 3: (-3, 3), 4: (0, 0), 5: (-200, -60)}[way]
        if way == 4:
            a = source.integers(0, 1 << bits, a_shape, np.uint32)
            b = source.integers(0, 1 << bits, b_shape, np.uint32)
            c = source.integers(0, 1 << 32, c_shape, np.uint32)
        else:
            a = _drawn(source, a_format, a_shape, low, high)
            b = _drawn(source, b_format, b_shape, low, high)
            reach = 0 if way == 0 else 2 * high
            c = _drawn(source, _FLOAT, c_shape, 2 * low - 4, reach + 4)
            if case // 6 % 2:
                c[:] = 0
        if way == 2:
            a[source.random(a_shape) < 0.7] = 0
        if way == 3:
            b[..., depth // 2 :] = b[..., : depth // 2] ^ (1 << bits - 1)
            changed = source.random(a_shape[:-1] + (depth // 2,)) < 0.25
            a[..., depth // 2 :] = a[..., : depth // 2] ^ np.where(changed, 1, 0)
            places = source.permutation(depth)
            a, b = a[..., places], b[..., places]
        all_a.append(a.astype(kind))
        all_b.append(b.astype(kind))
        all_c.append(c.astype(np.uint32))
    return np.stack(all_a), np.stack(all_b), np.stack(all_c)


def special_inputs(name: str) -> tuple[np.ndarray, int]:
    """Return arguments of a special function as bits, and how many first ones follow each other.

    Of the results for those, a record keeps how far each is from the one before.
    """
    one, two, octave = 0x3F800000, 0x40000000, 1 << 23
    many = {
        "ex2": np.arange(one, two),
        "rcp": np.arange(one, two),
        "rsqrt": np.arange(one, two + octave, 4),
        "lg2": np.arange(one - 2 * octave, two + octave),
    }[name]
    source = np.random.Generator(np.random.PCG64(7))
    more = [source.integers(0, 1 << 32, 1 << 16), np.arange(one - octave, two, 32)]
    if name == "ex2":
        exponents, signs = source.integers(90, 136, 1 << 19), source.integers(0, 2, 1 << 19)
        more.append(source.integers(0, 1 << 23, 1 << 19) | exponents << 23 | signs << 31)
    if name == "lg2":
        more.append(source.integers(1 << 23, 0x7F800000, 1 << 20))
    return np.concatenate([many, *more]).astype(np.uint32), len(many)


SPECIALS = ("ex2", "lg2", "rcp", "rsqrt")


def matrices_given() -> np.ndarray:
    return np.random.Generator(np.random.PCG64(9)).integers(0, 1 << 32, (32, 4), np.uint32)


def _digest(*arrays: np.ndarray) -> np.ndarray:
    return np.array(hashlib.sha1(b"".join(x.tobytes() for x in arrays)).hexdigest())


def record(directory: Path, commit: str) -> int:
    """Compile, run, and write what was left."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "products.cubin"
        command = ["nvcc", "-O3", "-std=c++17", "-arch=sm_90a", "-cubin", "-o", str(file), str(SOURCE)]
        subprocess.run(command, check=True)
        image = file.read_bytes()
    driver = Driver()
    device = subprocess.run(
        ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True
    ).stdout.splitlines()[:1]
    certificate = f"{device}; {' '.join(sys.argv)}; {datetime.date.today().isoformat()}; commit {commit}"
    said: dict[str, Any] = {"certificate": np.array(certificate), "image": np.frombuffer(image, np.uint8)}
    left: dict[str, Any] = {}
    for product in PRODUCTS:
        a, b, c = factors(product)
        d = np.zeros_like(c)
        places = [driver.put(np.ascontiguousarray(x)) for x in (a, b, c, d)]
        driver.launch(image, product.name, CASES, product.threads, [bytes(x) for x in places])
        driver.get(d, places[3])
        left[product.name], left[f"{product.name}_given"] = d, _digest(a, b, c)
        print(product.name, flush=True)
    given = matrices_given()
    stored, loaded = np.zeros_like(given), np.zeros_like(given)
    places = [driver.put(x) for x in (given, stored, loaded)]
    driver.launch(image, "matrices", 1, 32, [bytes(x) for x in places])
    driver.get(stored, places[1])
    driver.get(loaded, places[2])
    np.savez_compressed(directory / "products.npz", **said, **left, stored=stored, loaded=loaded)
    left = {}
    for name in SPECIALS:
        x, many = special_inputs(name)
        y = np.zeros_like(x)
        places = [driver.put(x), driver.put(y)]
        parameters = [*map(bytes, places), len(x).to_bytes(4, "little")]
        driver.launch(image, f"special_{name}", _SPECIAL_CTAS, _SPECIAL_THREADS, parameters)
        driver.get(y, places[1])
        left[f"{name}_steps"] = np.diff(y[:many], prepend=np.uint32(0))
        left[name] = y[many:]
        print(name, flush=True)
    np.savez_compressed(directory / "special.npz", **said, **left)
    print(certificate)
    return 0


def emulated(image: Path, name: str, ctas: int, threads: int, arrays: list[np.ndarray], more: bytes = b"") -> None:
    """Run a kernel of an image in the emulator over arrays, whose addresses are its first parameters."""
    module = machine_code_module(image, frozenset([name]))
    regions = [Region(x.ctypes.data, x.nbytes, f"array {i}") for i, x in enumerate(arrays)]
    block = b"".join(x.ctypes.data.to_bytes(8, "little") for x in arrays) + more
    launch = Launch(name, (ctas, 1, 1), (threads, 1, 1), (1, 1, 1), 0, block)
    run_launches(module, [launch], regions, Options(hardware_sums=True))


def compare(directory: Path) -> list[str]:
    """Run recorded kernels in the emulator, print what differs, and return the names of those that do."""
    recorded = np.load(directory / "products.npz")
    print(recorded["certificate"])
    differing: list[str] = []

    def told(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        wrong = int((ours != theirs).sum())
        differing.extend([name] if wrong else [])
        print(f"{name}: {wrong} of {ours.size} words differ" if wrong else f"{name}: equal", flush=True)

    with tempfile.TemporaryDirectory() as scratch:
        image = Path(scratch) / "products.cubin"
        image.write_bytes(recorded["image"].tobytes())
        for product in PRODUCTS:
            a, b, c = factors(product)
            d = np.zeros_like(c)
            if _digest(a, b, c) != recorded[f"{product.name}_given"]:
                raise ValueError("this NumPy draws other numbers than the one that the record was made with")
            emulated(image, product.name, CASES, product.threads, [a, b, c, d])
            told(product.name, d, recorded[product.name])
        given = matrices_given()
        stored, loaded = np.zeros_like(given), np.zeros_like(given)
        emulated(image, "matrices", 1, 32, [given, stored, loaded])
        told("stmatrix", stored, recorded["stored"])
        told("ldmatrix", loaded, recorded["loaded"])
        special = np.load(directory / "special.npz") if (directory / "special.npz").exists() else {}
        for name in SPECIALS if special else ():
            x, many = special_inputs(name)
            x = x[many:].copy()
            y = np.zeros_like(x)
            emulated(image, f"special_{name}", 8, _SPECIAL_THREADS, [x, y], len(x).to_bytes(4, "little"))
            told(name, y, special[name])
    return differing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = parser.add_subparsers(dest="way", required=True)
    recording, comparing = ways.add_parser("record"), ways.add_parser("compare")
    for way in (recording, comparing):
        way.add_argument("directory", type=Path)
    recording.add_argument("--commit", required=True)
    options = parser.parse_args()
    if options.way == "record":
        return record(options.directory, options.commit)
    return 1 if compare(options.directory) else 0


if __name__ == "__main__":
    sys.exit(main())
