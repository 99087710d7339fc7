"""The switch, its errors, and the proof that contract and device double bite."""

import builtins
import dataclasses
import operator
import sys
from types import SimpleNamespace

import cupy_contract
import numpy as np
import pytest
from device_double import COUNTS, DeviceDouble
from models import PLAIN
from strategies import DTYPES

import pyrope
from pyrope import Rope, rotation
from pyrope.theta import LAYOUTS

needs_wheel = pytest.mark.skipif(cupy_contract.real is None, reason=cupy_contract.REASON)


def test_round_trip_keeps_values_and_dtype(xp):
    host = np.arange(6, dtype=np.float32).reshape(2, 3)
    back = pyrope.to_numpy(pyrope.from_numpy(host, xp))
    assert isinstance(back, np.ndarray) and back.dtype == np.float32 and (back == host).all()
    assert pyrope.backend.namespace(x := pyrope.from_numpy(host, xp), None, out=x) is xp


def test_what_is_narrow_is_computed_in_float32():
    computed = {name: pyrope.backend.compute_dtype("x", np.zeros(1, dtype)).name for name, dtype in DTYPES.items()}
    assert computed == dict.fromkeys(("float16", "bfloat16", "float32"), "float32") | {"float64": "float64"}


@needs_wheel
def test_mixed_libraries_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", double := DeviceDouble())
    device = double.asarray(np.ones(3))
    with pytest.raises(TypeError, match="q is a numpy array, k is a cupy array"):
        pyrope.backend.namespace(q=np.ones(3), k=device)
    with pytest.raises(TypeError, match="must be a NumPy array, was a CuPy array: to_numpy copies it"):
        pyrope.from_numpy(device, "numpy")
    with pytest.raises(TypeError, match="argument 1 is a cupy array, argument 2 is a numpy array"):
        pyrope.backend.namespace(device, np.ones(3))
    with pytest.raises(TypeError, match="x is a cupy array, out is a numpy array"):
        pyrope.rotate(double.asarray(np.ones((1, 4))), [0], Rope(4, 10000.0, "half"), out=np.ones((1, 4)))


@pytest.mark.parametrize(
    "thing, name",
    [
        ([1.0, 2.0], "list"), (3.0, "float"), (np.float32(3), "numpy.float32"), (memoryview(b"ab"), "memoryview"),
        (np.ma.masked_array([1.0]), "numpy.*MaskedArray"), (np.rec.array([1.0]), "numpy.*recarray"),
    ],
)  # fmt: skip
def test_what_is_no_array_is_refused_by_type(thing, name):
    with pytest.raises(TypeError, match=f"x must be a NumPy or CuPy array, was {name}: convert it first"):
        pyrope.backend.namespace(x=thing)
    with pytest.raises(TypeError, match=f"array must be a NumPy or CuPy array, was {name}: convert it first"):
        pyrope.from_numpy(thing, "numpy")


@pytest.mark.parametrize(
    "call, error, match",
    [
        (lambda: pyrope.backend.namespace(None), TypeError, "at least one array"),
        (lambda: pyrope.backend.get("torch"), ValueError, 'must be "numpy" or "cupy", was \'torch\''),
        (lambda: pyrope.backend.get(None), ValueError, 'must be "numpy" or "cupy", was None'),
        (lambda: pyrope.from_numpy(np.ones(3), 5), TypeError, "must be a name or an array module, was 5"),
    ],
)
def test_what_is_no_backend(call, error, match):
    with pytest.raises(error, match=match):
        call()


def test_cupy_missing_says_what_to_install(monkeypatch):
    def no_cupy(name, *args, **kwargs):
        if name.startswith("cupy"):
            raise ModuleNotFoundError("No module named 'cupy'")
        return genuine(name, *args, **kwargs)

    genuine = builtins.__import__
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(pyrope.backend.importlib, "import_module", no_cupy)
    with pytest.raises(ImportError, match=r"needs CuPy.*No module named 'cupy'.*pip install \"\.\[cuda13\]\""):
        pyrope.backend.get("cupy")


def _stub(count, total=6):
    def devices():
        if isinstance(count, Exception):
            raise count
        return count

    runtime = SimpleNamespace(getDeviceCount=devices)
    array = SimpleNamespace(sum=lambda: total)
    return SimpleNamespace(__version__="14", cuda=SimpleNamespace(runtime=runtime), arange=lambda n: array)


@pytest.mark.parametrize("count", [0, RuntimeError("cudaErrorInsufficientDriver")])
def test_cupy_without_a_device_says_what_to_check(monkeypatch, count):
    monkeypatch.setitem(sys.modules, "cupy", _stub(count))
    with pytest.raises(RuntimeError, match="is installed, but no CUDA device answers .*nvidia-smi"):
        pyrope.backend.get("cupy")


def test_a_device_that_computes_wrongly_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", _stub(1, total=0))
    with pytest.raises(RuntimeError, match=r"0\+1\+2\+3 = 0"):
        pyrope.backend.get("cupy")


@needs_wheel
@pytest.mark.parametrize(
    "source, message",
    [
        ("with xp.errstate(all='ignore'): pass", "cupy has no errstate"),
        ("xp.add(a, b, where=c)", "cupy.add has no keyword where"),
        ("xp.empty(3, like=a)", "cupy.empty has no keyword like"),
        ("xp.linalg.rotate(a)", "cupy has no linalg.rotate"),
        ("xp.multiply(a, b, **more)", "no keyword None"),
    ],
)
def test_contract_bites(source, message):
    assert message in " ".join(cupy_contract.violations(source))


@needs_wheel
@pytest.mark.parametrize(
    "forbidden",
    [
        pytest.param(lambda xp, x: xp.errstate(all="ignore"), id="a name that CuPy lacks"),
        pytest.param(lambda xp, x: np.asarray(x), id="an implicit np.asarray"),
        pytest.param(lambda xp, x: np.add(x, x), id="a NumPy function on a device array"),
        pytest.param(lambda xp, x: x * np.ones(3), id="a NumPy array in an expression"),
        pytest.param(lambda xp, x: np.ones(3) * x, id="a NumPy array before it"),
        pytest.param(lambda xp, x: x * np.float64(2.0), id="a NumPy scalar, which would widen float32"),
        pytest.param(lambda xp, x: xp.add(x, np.ones(3)), id="a NumPy array in a call"),
        pytest.param(lambda xp, x: xp.add(x, x, where=x > 0), id="a keyword that CuPy lacks"),
        pytest.param(lambda xp, x: x.sum(where=x > 0), id="a keyword that a method lacks"),
        pytest.param(lambda xp, x: x.resize(4), id="a method that CuPy lacks"),
        pytest.param(lambda xp, x: x.__setitem__(0, np.ones(1)), id="assigning a NumPy array"),
        pytest.param(lambda xp, x: x[np.array([0, 1])], id="indexing with a NumPy array"),
        pytest.param(lambda xp, x: x.__iadd__(np.ones(3, np.float32)), id="a NumPy array added in place"),
        pytest.param(lambda xp, x: operator.iadd(x.astype(int), x), id="floats added to integers in place"),
        pytest.param(lambda xp, x: operator.imul(x, np.float32(2)), id="a NumPy scalar multiplied in place"),
        pytest.param(lambda xp, x: range(x.sum().astype(int)), id="a device integer as an index of Python"),
        pytest.param(lambda xp, x: xp.where(True, x, 0), id="a condition that is no array"),
        pytest.param(lambda xp, x: x.flags.writeable, id="the flag writeable, which CuPy lacks"),
        pytest.param(lambda xp, x: x.flags.aligned, id="the flag aligned, which CuPy lacks"),
    ],
)
def test_device_double_bites(forbidden):
    double = DeviceDouble()
    with pytest.raises((TypeError, AttributeError)):
        forbidden(double, double.asarray(np.ones(3, np.float32)))


@needs_wheel
def test_device_double_computes_and_keeps_dtypes():
    xp = DeviceDouble()
    x = xp.asarray(np.arange(4, dtype=np.float32))
    assert (2.0 * x + x).dtype == np.float32 and xp.multiply(x, x).get().tolist() == [0, 1, 4, 9]
    assert xp.take(x, xp.asarray(np.array([5]))).get().tolist() == [1]  # wraps silently, as CuPy does
    assert np.isnan(xp.empty(3, np.float32).get()).all()
    assert x.flags.c_contiguous and not xp.asarray(np.ones((4, 4)))[:, ::2].flags.c_contiguous


@needs_wheel
def test_indices_of_the_double_wrap_as_in_cupy():
    xp = DeviceDouble()
    host = np.arange(24.0).reshape(2, 3, 4)
    x, at = xp.asarray(host), xp.asarray(np.array([5, -1, 0]))
    rows = xp.asarray(np.array([3, -2]))
    assert (x[..., at].get() == host[..., [1, 3, 0]]).all()
    assert (x[:, at].get() == host[:, [2, 2, 0]]).all()
    assert (x[rows, None, ..., rows].get() == host[[1, 0], None, ..., [3, 2]]).all()
    assert (x[xp.asarray(np.eye(2, 3, dtype=bool)), xp.asarray(np.array([4, 7]))].get() == [0, 19]).all()
    x[rows, 0] = 7.0
    assert (x[:, 0].get() == 7).all()
    with pytest.raises(IndexError):  # a plain integer is checked, in CuPy too
        x[2]


@needs_wheel
def test_a_numpy_constant_in_the_core_fails_on_the_double(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", double := DeviceDouble())
    x, rope = double.asarray(np.ones((1, 4), np.float32)), Rope(4, 10000.0, "half")
    assert pyrope.to_numpy(pyrope.rotate(x, [0], rope)).tolist() == [[1, 1, 1, 1]]
    monkeypatch.setattr(rotation, "from_numpy", lambda array, xp: array)  # tables stay on the host
    with pytest.raises(TypeError, match="NumPy value among device arrays|does not support ufuncs"):
        pyrope.rotate(x, [0], rope)


def counted(xp, call):
    """Launches and waits of a call whose kernels are there already: on the double, or where CuPy runs on the CPU."""
    if xp is np or not (isinstance(xp, DeviceDouble) or cupy_contract.ON_CPU):
        pytest.skip("nothing to count, or nobody who counts")

    def counts():
        return (COUNTS["launches"], COUNTS["waits"]) if isinstance(xp, DeviceDouble) else cupy_contract.counts()

    call()
    before = counts()
    call()
    return tuple(np.subtract(counts(), before))


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rotation_is_one_launch(xp, layout, dtype):
    x, rope = pyrope.from_numpy(np.ones((2, 3, 8), DTYPES[dtype]), xp), Rope(8, 10000.0, layout)
    tables = pyrope.rotation_tables(range(3), rope, like=x)
    assert counted(xp, lambda: pyrope.rotate(x, tables.positions, rope, tables=tables)) == (1, 0)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_ten_launches_and_one_wait(xp, causal):
    x = pyrope.from_numpy(np.ones((2, 4, 5, 8), np.float32), xp)
    launches, waits = counted(xp, lambda: pyrope.attention(x, x, x, causal=causal))
    assert launches <= 10 and waits == 1


@pytest.mark.parametrize("attention, most", [("softmax", 24), ("linear", 110)])
def test_a_decoding_step_of_a_layer_is_few_launches_and_no_wait(xp, attention, most):
    def step(depth):
        config = dataclasses.replace(PLAIN, attention=attention, layers=PLAIN.layers[:1] * depth)
        cache = pyrope.Cache(model := pyrope.random_model(config, 0, xp), 9)
        pyrope.forward(model, [1, 2, 3], cache=cache)
        return np.array(counted(xp, lambda: pyrope.forward(model, [4], cache=cache)))

    shallow, deep = step(1), step(3)
    assert shallow[1] == deep[1] == 1  # the one wait is for the logits
    assert (deep - shallow)[0] <= 2 * most
