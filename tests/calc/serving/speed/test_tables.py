import numpy as np
import pytest

from calc.serving.speed.tables import Grid


def test_a_grid_is_exact_at_its_knots_and_for_what_is_linear_between_them():
    grid = Grid(lambda x, y: 3 * x + y + 1, (0, 9, 2), (4, 5, 1))
    for x, y in [(1, 16), (2, 64), (7.3, 100), (16, 256), (40, 300)]:
        assert grid(x, y) == pytest.approx(3 * x + y + 1)


def test_numbers_and_arrays_agree_and_below_the_first_knot_the_edge_holds():
    grid = Grid(lambda x, y: np.sqrt(x * y), (0, 9, 2), (4, 5, 1))
    x, y = np.array([0.5, 1, 3, 17, 90]), np.array([3.0, 16, 77, 255, 1000])
    assert grid(x, y) == pytest.approx([grid(float(a), float(b)) for a, b in zip(x, y, strict=True)])
    assert grid(0.1, 16) == grid(1, 16)


def test_beyond_the_last_knot_the_last_slope_goes_on():
    grid = Grid(lambda x: 2 * x, (0, 5, 1))
    assert grid(100) == pytest.approx(200)
