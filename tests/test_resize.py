"""Progressive resizing: when, how much, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from torrential.data.resize import Resize
from torrential.errors import BadInput


def test_stages() -> None:
    resize = Resize.parse("0:0.5, 0.6:0.75,0.8:1")
    assert resize == Resize([(0.0, 0.5), (0.6, 0.75), (0.8, 1.0)])
    assert str(resize) == "0:0.5,0.6:0.75,0.8:1" and Resize.parse(str(resize)) == resize
    places = [0.0, 0.3, 0.599, 0.6, 0.79, 0.8, 1.0, 1.5]
    assert [resize.at(p) for p in places] == [0.5, 0.5, 0.5, 0.75, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "list of start:scale"),
        ("0:0.5,", "list of start:scale"),
        ("half", "list of start:scale"),
        ("0:1:2", "list of start:scale"),
        ("0.1:0.5", "must begin at 0"),
        ("nan:0.5", "must begin at 0"),
        ("0:0.5,0.6:0.7,0.6:1", "one after the other"),
        ("0:0.5,0.6:0.7,0.5:1", "one after the other"),
        ("0:0.5,60:1", "one after the other, before 1"),
        ("0:0", "above 0 and at most 1"),
        ("0:-1", "above 0 and at most 1"),
        ("0:2", "above 0 and at most 1"),
        ("0:nan", "above 0 and at most 1"),
    ],
)
def test_bad_strings(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as caught:
        Resize.parse(text)
    assert "try 0:0.5,0.6:1" in str(caught.value)


def test_no_stages() -> None:
    with pytest.raises(BadInput, match="must begin at 0"):
        Resize([])


def test_full_size_is_the_same_tensor() -> None:
    images = torch.randn(2, 3, 8, 8)
    assert Resize.apply(images, 1.0) is images


def test_sizes_and_values() -> None:
    images = torch.randn(4, 3, 31, 16)
    small = Resize.apply(images, 0.5)
    assert small.shape == (4, 3, 16, 8) and small.dtype == images.dtype
    assert Resize.apply(torch.full((1, 1, 9, 9), 0.25), 0.4).numpy() == pytest.approx(0.25)
    assert Resize.apply(images, 1 / 16).shape == (4, 3, 2, 1)


def test_nothing_left_of_an_image() -> None:
    said = "nothing of images of 31 × 16 .scale: 0.03.; use scales of at least 0.062"
    with pytest.raises(BadInput, match=said):
        Resize.apply(torch.randn(4, 3, 31, 16), 0.03)


def test_fine_patterns_are_averaged_away() -> None:
    """Stripes one pixel wide: without antialiasing some phases would survive."""
    stripes = (torch.arange(32) % 2).float().expand(1, 1, 32, 32)
    inner = Resize.apply(stripes, 0.25)[..., 1:-1]
    assert inner.numpy() == pytest.approx(0.5, abs=0.03)


def test_whole_numbers_stay_whole() -> None:
    images = torch.tensor([[0, 255], [255, 255]], dtype=torch.uint8).expand(1, 1, 2, 2)
    small = Resize.apply(images, 0.5)
    assert small.dtype == torch.uint8 and small.tolist() == [[[[191]]]]


@pytest.mark.parametrize("scale", [0.5, 1.0])
@pytest.mark.parametrize(("inputs", "said"), [(torch.zeros(8, 64), "shape .8, 64."), ([torch.zeros(1)], "list")])
def test_only_images(inputs: object, said: str, scale: float) -> None:
    with pytest.raises(BadInput, match=rf"only images .* \(got {said}\)"):
        Resize.apply(inputs, scale)
