"""A small vision transformer with axial attention, and the row and column caches of its inference.

Each block attends along the rows of the image, then along its columns ("Axial Attention in
Multidimensional Transformers", 2019). A server that sees nearly the same image again, after an edit
or in the next frame, keeps for every row and every column the keys and values that it last had
there, and computes only what a change can reach.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

Axis = Literal["row", "column"]
AXES: tuple[Axis, Axis] = ("row", "column")
SIZE = 8  # the digits of scikit-learn are 8 x 8 pixels; each pixel is a token


class Axial(nn.Module):
    """Attention of every token to its own line along one axis.

    Shapes: B images, S x S tokens, D numbers each, H heads.
    """

    def __init__(self, dim: int, heads: int, axis: Axis) -> None:
        super().__init__()
        self.heads, self.axis = heads, axis
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))
        self.out = nn.Linear(dim, dim)

    def lines(self, x: Float[Tensor, "B S S D"]) -> Float[Tensor, "B S S D"]:
        """The tokens sorted by line: along rows as they are, along columns turned."""
        return x if self.axis == "row" else x.transpose(1, 2)

    def keys_and_values(self, lines: Float[Tensor, "N S D"]) -> Float[Tensor, "2 N S D"]:
        """What a cache keeps of each line."""
        normed = self.norm(lines)
        return torch.stack([self.key(normed), self.value(normed)])

    def attend(
        self, lines: Float[Tensor, "N S D"], kv: Float[Tensor, "2 N S D"]
    ) -> tuple[Float[Tensor, "N S D"], Float[Tensor, "N H S S"]]:
        """What attention adds to the tokens of each line, and its weights."""
        n, size, dim = lines.shape

        def heads(x: Tensor) -> Tensor:
            return x.view(n, size, self.heads, dim // self.heads).transpose(1, 2)

        query, key, value = heads(self.query(self.norm(lines))), heads(kv[0]), heads(kv[1])
        weights = (query @ key.transpose(2, 3) / (dim // self.heads) ** 0.5).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(n, size, dim)), weights

    def forward(self, x: Float[Tensor, "B S S D"]) -> Float[Tensor, "B S S D"]:
        lines = self.lines(x)
        flat = lines.flatten(0, 1)
        added, _ = self.attend(flat, self.keys_and_values(flat))
        return x + self.lines(added.view_as(lines))


class Mlp(nn.Module):
    """What happens to each token alone."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim)
        )

    def forward(self, x: Float[Tensor, "*any D"]) -> Float[Tensor, "*any D"]:
        return x + self.net(x)


class Block(nn.Module):
    """Along the rows, along the columns, then each token alone."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.row, self.column = Axial(dim, heads, "row"), Axial(dim, heads, "column")
        self.mlp = Mlp(dim)

    def forward(self, x: Float[Tensor, "B S S D"]) -> Float[Tensor, "B S S D"]:
        return self.mlp(self.column(self.row(x)))


class AxialViT(nn.Module):
    """Pixels to tokens, some blocks, and a class at the end."""

    def __init__(self, dim: int = 32, heads: int = 4, blocks: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.embed = nn.Linear(1, dim)
        self.place = nn.Parameter(torch.randn(SIZE, SIZE, dim) * 0.3)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(SIZE * SIZE * dim, classes)

    def tokens(self, images: Float[Tensor, "B S S"]) -> Float[Tensor, "B S S D"]:
        """One token for each pixel."""
        return self.embed(images[..., None]) + self.place

    def classify(self, x: Float[Tensor, "B S S D"]) -> Float[Tensor, "B K"]:
        """Logits of the classes from the tokens of the last block."""
        return self.head(self.norm(x).flatten(1))

    def forward(self, images: Float[Tensor, "B S S"]) -> Float[Tensor, "B K"]:
        x = self.tokens(images)
        for block in self.blocks:
            x = block(x)
        return self.classify(x)


def train(
    model: AxialViT,
    images: Float[Tensor, "N S S"],
    labels: Int[Tensor, " N"],
    epochs: int = 20,
    seed: int = 0,
) -> list[float]:
    """Train with Adam and one cosine of the learning rate; returns the mean loss of each epoch."""
    draw = torch.Generator().manual_seed(seed)
    batch, steps = 64, epochs * -(-len(images) // 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    losses = []
    for _ in range(epochs):
        total = 0.0
        for chosen in torch.randperm(len(images), generator=draw).split(batch):
            loss = nn.functional.cross_entropy(model(images[chosen]), labels[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += float(loss.detach()) * len(chosen)
        losses.append(total / len(images))
    return losses


class Owner(NamedTuple):
    """Whose keys and values a token of a line has: which image, line and token, and how new."""

    image: str
    axis: Axis
    line: int
    token: int
    version: int


@dataclass
class Line:
    """What is kept of one row or column of one stage.

    Attributes:
        kv: Keys and values of its tokens.
        out: The tokens behind the attention.
        weights: How much each token looks at each other one, mean of the heads.
        owners: Whose keys and values these are, token by token.
    """

    kv: Float[Tensor, "2 S D"]
    out: Float[Tensor, "S D"]
    weights: Float[Tensor, "S S"]
    owners: list[Owner]


class LineCache:
    """Rows and columns that were computed before.

    The key holds image, version, block, axis and number: whatever the line depends on. A fault
    forgets one of them.
    """

    def __init__(self) -> None:
        self.lines: dict[Hashable, Line] = {}

    def key(self, image: str, version: int, block: int, axis: Axis, line: int) -> Hashable:
        """What a line is found by."""
        return image, version, block, axis, line

    def get(self, image: str, version: int, block: int, axis: Axis, line: int) -> Line | None:
        """The line, if it is there."""
        return self.lines.get(self.key(image, version, block, axis, line))

    def put(self, kept: Line, image: str, version: int, block: int, axis: Axis, line: int) -> None:
        """Keep a line, and drop its last version."""
        self.lines.pop(self.key(image, version - 1, block, axis, line), None)
        self.lines[self.key(image, version, block, axis, line)] = kept


@dataclass
class Seen:
    """What a stage got for an image at its last visit, and how often each token has changed."""

    lines: Float[Tensor, "S S D"]
    tokens: Int[Tensor, "S S"]  # version of each token
    versions: list[int]  # of each line


@dataclass
class Served:
    """One answer.

    Attributes:
        computed: Tokens for which keys and values, a query, or the MLP were computed.
        whole: The same for an image that was never here.
        foreign: Share of each pixel's attention on keys and values of another image, line or
            version, in image order; by block and axis.
    """

    logits: Float[Tensor, " K"] = field(default_factory=lambda: torch.empty(0))
    computed: int = 0
    whole: int = 0
    foreign: dict[tuple[int, Axis], Float[Tensor, "S S"]] = field(default_factory=dict)

    @property
    def label(self) -> int:
        """The class."""
        return int(self.logits.argmax())

    @property
    def foreign_mass(self) -> float:
        """Mean share of attention that went to what is not the image's own."""
        return float(torch.stack(list(self.foreign.values())).mean())


class AxialServer:
    """Answers for images that come back changed, and computes only what the change reaches.

    A line whose tokens are as before is taken from the cache. Of a changed line only the new tokens
    write keys and values; all its tokens look again.

    Args:
        cache: Where lines are kept, shared by all images.
    """

    def __init__(self, model: AxialViT, cache: LineCache | None = None) -> None:
        self.model, self.cache = model, cache if cache is not None else LineCache()
        self._seen: dict[tuple[str, int, Axis], Seen] = {}
        self._mlp: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    @torch.no_grad()
    def serve(self, image: str, pixels: Float[Tensor, "S S"]) -> Served:
        """Classify an image that is known by a name; what changed since its last visit is found.

        Raises:
            ValueError: Pixels of another size.
        """
        if tuple(pixels.shape) != (SIZE, SIZE):
            raise ValueError(f"images are {SIZE} x {SIZE} pixels, got {tuple(pixels.shape)}")
        served = Served()
        x = self.model.tokens(pixels[None])[0]
        for number, block in enumerate(self.model.blocks):
            assert isinstance(block, Block)
            x = self._stage(image, number, block.row, x, served)
            x = self._stage(image, number, block.column, x, served)
            x = self._alone(image, number, block.mlp, x, served)
        served.logits = self.model.classify(x[None])[0]
        return served

    def _stage(
        self, image: str, block: int, stage: Axial, x: Float[Tensor, "S S D"], served: Served
    ) -> Float[Tensor, "S S D"]:
        """All lines of one axis, from the cache where nothing in them has changed."""
        axis, lines = stage.axis, stage.lines(x[None])[0]
        seen, changed = self._changes((image, block, axis), lines)
        read = []
        for i in range(SIZE):
            kept = self.cache.get(image, seen.versions[i], block, axis, i)
            if kept is None:
                old = self.cache.get(image, seen.versions[i] - 1, block, axis, i)
                new = changed[i] if old is not None else torch.ones(SIZE, dtype=torch.bool)
                owners = [Owner(image, axis, i, t, int(v)) for t, v in enumerate(seen.tokens[i])]
                kept = self._line(stage, lines[i], old, new, owners)
                self.cache.put(kept, image, seen.versions[i], block, axis, i)
                served.computed += int(new.sum()) + SIZE
            read.append(kept)
        served.whole += 2 * SIZE * SIZE
        served.foreign[block, axis] = self._foreign(image, stage, read, seen)
        return stage.lines(torch.stack([r.out for r in read])[None])[0]

    def _changes(
        self, where: tuple[str, int, Axis], lines: Float[Tensor, "S S D"]
    ) -> tuple[Seen, Bool[Tensor, "S S"]]:
        """What of a stage's input differs from the last visit; counts its versions on."""
        seen = self._seen.get(where)
        if seen is None:
            seen = Seen(lines, torch.zeros(SIZE, SIZE, dtype=torch.long), [0] * SIZE)
            self._seen[where] = seen
            return seen, torch.ones(SIZE, SIZE, dtype=torch.bool)
        changed = (lines != seen.lines).any(-1)
        seen.lines, seen.tokens = lines, seen.tokens + changed
        seen.versions = [v + int(c) for v, c in zip(seen.versions, changed.any(1), strict=True)]
        return seen, changed

    def _line(
        self,
        stage: Axial,
        line: Float[Tensor, "S D"],
        old: Line | None,
        new: Bool[Tensor, " S"],
        owners: list[Owner],
    ) -> Line:
        """One line: new tokens write, the others keep what the last version wrote; all read."""
        kv = torch.empty(2, *line.shape) if old is None else old.kv.clone()
        kv[:, new] = stage.keys_and_values(line[None])[:, 0, new]
        added, weights = stage.attend(line[None], kv[:, None])
        if old is not None:
            pairs = zip(owners, old.owners, new.tolist(), strict=True)
            owners = [mine if fresh else before for mine, before, fresh in pairs]
        return Line(kv, line + added[0], weights[0].mean(0), owners)

    def _foreign(
        self, image: str, stage: Axial, read: list[Line], seen: Seen
    ) -> Float[Tensor, "S S"]:
        """Share of each token's attention on keys and values that are not what they should be."""
        mass = torch.zeros(SIZE, SIZE)
        for i, kept in enumerate(read):
            own = [Owner(image, stage.axis, i, t, int(v)) for t, v in enumerate(seen.tokens[i])]
            wrong = torch.tensor([a != b for a, b in zip(kept.owners, own, strict=True)])
            mass[i] = kept.weights[:, wrong].sum(1)
        return stage.lines(mass[None, :, :, None])[0, :, :, 0]

    def _alone(
        self, image: str, block: int, mlp: Mlp, x: Float[Tensor, "S S D"], served: Served
    ) -> Float[Tensor, "S S D"]:
        """The MLP, for tokens that have changed."""
        before, out = self._mlp.get((image, block), (x + 1, x))
        changed = (x != before).any(-1)
        out = out.clone()
        out[changed] = mlp(x[changed])
        self._mlp[image, block] = (x, out)
        served.computed += int(changed.sum())
        served.whole += SIZE * SIZE
        return out


class WithoutAxis(LineCache):
    """Rows and columns under one key: a column is read as what the row of its number wrote."""

    def key(self, image: str, version: int, block: int, axis: Axis, line: int) -> Hashable:
        return image, version, block, line  # BUG: no axis


class WithoutImage(LineCache):
    """One cache for all: whoever comes second gets the first one's lines."""

    def key(self, image: str, version: int, block: int, axis: Axis, line: int) -> Hashable:
        return version, block, axis, line  # BUG: no image


class WithoutVersion(LineCache):
    """An edited line is found under its old name and never computed again."""

    def key(self, image: str, version: int, block: int, axis: Axis, line: int) -> Hashable:
        return image, block, axis, line  # BUG: no version


class RowOrder(LineCache):
    """Columns lie in memory as they were written, and are read back in the order of rows."""

    def get(self, image: str, version: int, block: int, axis: Axis, line: int) -> Line | None:
        keys = [self.key(image, version, block, axis, other) for other in range(SIZE)]
        if axis == "row" or not all(key in self.lines for key in keys):
            return super().get(image, version, block, axis, line)
        across = [self.lines[key] for key in keys]  # BUG: token t of line i comes from line t
        return Line(
            torch.stack([one.kv[:, line] for one in across], 1),
            torch.stack([one.out[line] for one in across]),
            torch.stack([one.weights[line] for one in across]),
            [one.owners[line] for one in across],
        )


DEFECTS: dict[str, type[LineCache]] = {
    "column read as row": WithoutAxis,
    "another image's lines": WithoutImage,
    "not invalidated after an edit": WithoutVersion,
    "row order for column order": RowOrder,
}
"""Caches with one mistake each."""
