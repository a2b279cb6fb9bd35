"""Shares tensors of Forebay with NumPy, and with PyTorch on a CUDA device, without a copy where both are on it.

`cargo xtask python` builds the module and runs this script. By hand: `cargo build`, then
`python3 test_dlpack.py target/debug`.
"""

import importlib.machinery
import importlib.util
import pathlib
import sys
import traceback
import types


def load(folder):
    """Loads the module from the folder in which cargo built it."""
    files = pathlib.Path(folder).glob("*forebay_python.*")
    library = next(file for file in files if file.suffix in {".so", ".dylib", ".dll"})
    loader = importlib.machinery.ExtensionFileLoader("forebay_python", str(library))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("forebay_python", loader))
    loader.exec_module(module)
    return module


def assert_refused(call):
    """Calls a function that has to raise a BufferError."""
    try:
        call()
    except BufferError:
        return
    raise AssertionError("an exchange that cannot be met was not refused")


def check_numpy(forebay):
    """Contents pass through host memory, in both directions."""
    import numpy

    source = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    tensor = forebay.from_dlpack(source.T)
    tensor.add_(1)
    back = numpy.from_dlpack(tensor) if tensor.__dlpack_device__()[0] == 1 else numpy.from_dlpack(tensor, device="cpu")
    assert (back == source.T + 1).all(), back
    assert (source == numpy.arange(6).reshape(2, 3)).all(), "the host's memory was changed"
    assert_refused(lambda: tensor.__dlpack__(dl_device=(1, 0), max_version=(1, 0), copy=False))
    assert_refused(lambda: tensor.__dlpack__(dl_device=(10, 0), max_version=(1, 0)))
    assert_refused(lambda: tensor.__dlpack__())  # a consumer of an older DLPack
    capsule = tensor.__dlpack__(dl_device=(1, 0), max_version=(1, 0))
    producer = types.SimpleNamespace(__dlpack_device__=lambda: (1, 0), __dlpack__=lambda **_: capsule)
    again = forebay.from_dlpack(producer)
    assert_refused(lambda: forebay.from_dlpack(producer))  # its tensor was taken
    assert (numpy.from_dlpack(again, device="cpu") == back).all(), "the capsule's contents differ"
    unused = tensor.__dlpack__(dl_device=(1, 0), max_version=(1, 0))
    del unused, tensor  # the memory returns once, and the consumer's copy stays
    assert (back == source.T + 1).all(), back


def check_torch(forebay):
    """Both libraries see one memory, and their streams are ordered."""
    import torch

    if not torch.cuda.is_available():
        raise ImportError("there is no CUDA device")
    source = torch.ones(1 << 24, device="cuda")
    for stream in [torch.cuda.default_stream(), torch.cuda.Stream()]:
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            for _ in range(50):
                source.add_(1)  # many kernels, so that a missing order shows
            before = source.clone()
            tensor = forebay.from_dlpack(source)
            for _ in range(50):
                tensor.add_(1)
            back = torch.from_dlpack(tensor)
            assert back.data_ptr() == source.data_ptr(), "the memory was copied"
            back.add_(1)
            assert torch.equal(source, before + 51), (source[0], before[0])
            del back, tensor
            torch.cuda.synchronize()
        torch.cuda.default_stream().wait_stream(stream)


if __name__ == "__main__":
    forebay = load(sys.argv[1])
    passed = failed = skipped = 0
    for check in [check_numpy, check_torch]:
        try:
            check(forebay)
            print(f"passed  {check.__name__}")
            passed += 1
        except ImportError as missing:
            print(f"SKIPPED {check.__name__}: {missing}")
            skipped += 1
        except Exception:
            print(f"FAILED  {check.__name__}")
            traceback.print_exc()
            failed += 1
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    sys.exit(failed > 0)
