"""Guard zones around arguments and the comparison of outputs."""

from __future__ import annotations

import ctypes

import ml_dtypes
import numpy as np
import pytest

from tasks.engines.measuring.checking import TOLERANCE, GuardedArray, WrongOutput, compare, seed_of


def write_bytes(array: np.ndarray, offset: int, count: int = 1, value: int = 0) -> None:
    """Write as a kernel does that has lost its bounds."""
    ctypes.memset(array.ctypes.data + offset, value, count)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 2), (0, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "int8", "float64", "bool"])
def test_writing_inside_leaves_the_guards_alone(shape: tuple[int, ...], dtype: str) -> None:
    guarded = GuardedArray(shape, dtype)
    guarded.fill(1)
    write_bytes(guarded.array, 0, guarded.array.nbytes, 0)

    assert guarded.array.shape == shape
    assert guarded.array.dtype == dtype
    assert not guarded.array.size or guarded.array.ctypes.data % 64 == 0  # what TVM's kernels may rely on
    guarded.check_guards("0 of 1")


@pytest.mark.parametrize("offset", [-1, -256, 0, 255], ids=str)
@pytest.mark.parametrize("shape", [(7,), (16, 16)], ids=str)
def test_a_write_outside_is_seen(shape: tuple[int, ...], offset: int) -> None:
    guarded = GuardedArray(shape, "float32")
    write_bytes(guarded.array, offset if offset < 0 else guarded.array.nbytes + offset)

    with pytest.raises(WrongOutput, match="argument 2 of 3"):
        guarded.check_guards("2 of 3")


def test_contents_depend_on_the_seed_alone() -> None:
    arrays = [GuardedArray((4, 5), "float32") for _ in range(3)]
    for guarded, seed in zip(arrays, (7, 7, 8), strict=True):
        guarded.fill(seed)

    np.testing.assert_array_equal(arrays[0].array, arrays[1].array)
    assert (arrays[0].array != arrays[2].array).any()
    assert seed_of("w/0") == seed_of("w/0") != seed_of("w/1")


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
def test_contents_are_tame(dtype: str) -> None:
    guarded = GuardedArray((1000,), dtype)
    guarded.fill(0)
    values = guarded.array.astype(np.float64)

    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 1
    if dtype.startswith("float"):
        assert values.min() >= 0.09  # no division by zero, no logarithm of it; float16 rounds 0.1
    elif np.dtype(dtype).itemsize > 1:
        assert set(np.unique(values)) <= {0, 1}  # indices inside the smallest table


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_floats_may_differ_by_rounding_and_no_more(dtype: str) -> None:
    want = np.linspace(-3, 5, 1000).astype(dtype)
    limit = TOLERANCE[dtype] * 5  # a share of the largest magnitude
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 1000) * limit  # half the tolerance: other orders of sums

    compare([want], [(want.astype(np.float64) + noise).astype(dtype)])
    wrong = want.copy()
    wrong[500] += np.array(3 * limit).astype(dtype)
    with pytest.raises(WrongOutput, match="output 0 differs"):
        compare([want], [wrong])


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
def test_requantised_integers_may_be_off_by_one(dtype: str) -> None:
    info = np.iinfo(dtype)
    want = np.array([info.min, 0, 5, info.max], dtype)

    compare([want], [np.array([info.min + 1, 0, 6, info.max - 1], dtype)])
    with pytest.raises(WrongOutput):
        compare([want], [np.array([info.min, 2, 5, info.max], dtype)])
    with pytest.raises(WrongOutput):  # the difference itself must not wrap around
        compare([want], [np.array([info.max, 0, 5, info.max], dtype)])


def test_truth_values_must_be_equal() -> None:
    want = np.array([True, False, True])

    compare([want], [want.copy()])
    with pytest.raises(WrongOutput):
        compare([want], [~want])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nan_equals_nan_and_an_infinity_itself(dtype: str) -> None:
    # A mask of -inf before a softmax is an output like any other.
    want = np.array([1.0, np.nan, np.inf, -np.inf], dtype)

    compare([want], [want.copy()])
    for index, value in ((0, np.nan), (1, 1.0), (2, -np.inf), (3, 0.0), (0, np.inf)):
        wrong = want.copy()
        wrong[index] = value
        with pytest.raises(WrongOutput):
            compare([want], [wrong])


def test_every_output_is_looked_at_and_empty_ones_are_equal() -> None:
    same = np.ones(3, np.float32)
    compare([same, np.ones((0, 3), np.float32)], [same, np.ones((0, 3), np.float32)])
    with pytest.raises(WrongOutput, match="output 1"):
        compare([same, same], [same, same * 2])


def test_zeros_leave_little_room() -> None:
    want = np.zeros(4, np.float32)

    compare([want], [want])
    with pytest.raises(WrongOutput):
        compare([want], [want + np.float32(1e-5)])


def test_bfloat16_is_filled_and_compared_as_a_float() -> None:
    guarded = GuardedArray((1000,), "bfloat16")
    guarded.fill(0)
    want = guarded.array.copy()

    assert want.dtype == np.dtype(ml_dtypes.bfloat16)
    assert len(np.unique(want.astype(np.float32))) > 50
    compare([want], [want])
    # Half a unit of its eight bits is 2e-3; a quarter of the value is no rounding.
    with pytest.raises(WrongOutput):
        compare([want], [(want.astype(np.float32) * 0.75).astype(want.dtype)])
