import random

import pytest
import torch

from kvlab.vision import DEFECTS, SIZE, AxialServer, AxialViT, LineCache, train


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return AxialViT(dim=16, heads=2).eval()


def picture(seed):
    return torch.rand(SIZE, SIZE, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def gap(model, served, pixels):
    return float((served.logits - model(pixels[None])[0]).abs().max())


def test_any_sequence_of_edits_gives_the_full_recompute(model):
    draw = random.Random(0)
    server = AxialServer(model)
    now = {name: picture(i) for i, name in enumerate("abc")}
    for _ in range(60):
        name = draw.choice("abc")
        if draw.random() < 0.6:
            now[name] = now[name].clone()
            now[name][draw.randrange(SIZE), draw.randrange(SIZE)] = draw.random()
        served = server.serve(name, now[name])
        assert gap(model, served, now[name]) < 1e-4
        assert served.foreign_mass == 0


def test_nothing_is_computed_for_an_unchanged_image_and_everything_for_a_new_one(model):
    server = AxialServer(model)
    first, again = server.serve("a", picture(0)), server.serve("a", picture(0))
    assert first.computed == first.whole
    assert again.computed == 0
    assert torch.equal(first.logits, again.logits)


def test_a_changed_pixel_reaches_one_row_and_then_all_columns(model):
    server = AxialServer(model)
    pixels = picture(0)
    server.serve("a", pixels)
    changed = pixels.clone()
    changed[3, 4] += 0.5
    served = server.serve("a", changed)
    # Block 0: one token writes and its row looks; a row of tokens writes and all columns look; all
    # tokens pass the MLP. Block 1: everything.
    everything = 2 * SIZE * SIZE
    first = (1 + SIZE) + (SIZE + SIZE * SIZE) + SIZE * SIZE
    assert served.computed == first + 2 * everything + SIZE * SIZE
    assert served.whole == 4 * everything + 2 * SIZE * SIZE


def test_images_do_not_grow_the_cache_with_every_edit(model):
    server = AxialServer(model)
    for i in range(5):
        server.serve("a", picture(i))
    assert len(server.cache.lines) == 4 * SIZE


@pytest.mark.parametrize("name", DEFECTS)
def test_every_defect_changes_an_answer_and_shows_as_foreign_attention(model, name):
    server = AxialServer(model, DEFECTS[name]())
    a, b = picture(0), picture(1)
    edited = a.clone()
    edited[2:4, 3:6] = 1 - edited[2:4, 3:6]
    seen = [(server.serve(n, p), p) for n, p in (("a", a), ("a", a), ("a", edited), ("b", b))]
    assert max(gap(model, s, p) for s, p in seen) > 1e-3
    assert max(s.foreign_mass for s, _ in seen) > 0.001


def test_the_right_cache_has_no_foreign_attention(model):
    server = AxialServer(model, LineCache())
    for name, seed in (("a", 0), ("b", 1), ("a", 2), ("b", 1)):
        assert server.serve(name, picture(seed)).foreign_mass == 0


def test_another_size_is_refused(model):
    with pytest.raises(ValueError, match="8 x 8"):
        AxialServer(model).serve("a", torch.rand(4, 4))


def test_training_lowers_the_loss_and_repeats():
    def once():
        torch.manual_seed(0)
        images = torch.rand(32, SIZE, SIZE)
        return train(AxialViT(dim=16, heads=2), images, torch.arange(32) % 10, epochs=40)

    losses = once()
    assert losses[-1] < 0.5 * losses[0]
    assert once() == losses
