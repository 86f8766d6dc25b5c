"""The pictures that are stored are those that the code draws."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    spec = importlib.util.spec_from_file_location("pictures", DOCS / "pictures.py")
    pictures = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pictures)
    folder = tmp_path_factory.mktemp("pictures")
    pictures.draw(folder)
    return folder


def test_pictures_are_what_the_code_draws(drawn):
    names = sorted(path.name for path in drawn.iterdir())
    assert names == sorted(path.name for path in (DOCS / "assets").glob("*.png"))
    for name in names:
        stored, fresh = imread(DOCS / "assets" / name), imread(drawn / name)
        assert stored.shape == fresh.shape, f"{name} is out of date: run python docs/pictures.py"
        # Another version of a font moves edges of letters by a shade.
        assert np.abs(stored - fresh).mean() < 0.01, f"{name} is out of date: run python docs/pictures.py"
