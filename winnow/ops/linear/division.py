"""How Hopper's MXFP8 products divide their work: plain numbers to frozen data.

Knows nothing of tensors, and how many CTAs and clusters a device holds it is told.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_SLICED_STRIPS = 16
"""Of a tile, at most: one for each warp."""
_PIECE_COST = 6
"""What a piece costs a CTA besides its strips, in strips of it: fitted to what was measured."""
_RANGED_COLUMNS = (96, 128, 192, 256)
_COLUMNS_COST = 24
"""What a tile of rows costs besides them, in rows: fitted to what was measured."""
_SHARE_COST = 3
"""What leaving a share costs a CTA, in pieces of its tile: fitted to what was measured."""
_REST_COST = 2
"""What a pair of CTAs should multiply besides, so that the rest of its tile is there in time, in
pieces."""


@dataclass(frozen=True)
class Slicing:
    """How csrc/slices.cu divides its work: K in `slices`, the CTAs of a cluster, strips in `tiles`,
    which `clusters` clusters take in turn."""

    slices: int
    tiles: int
    clusters: int

    def cost(self, strips: int, pieces: int) -> int:
        """Of the CTA that has the most to do, in pieces of strips."""
        turns, own = -(-self.tiles // self.clusters), -(-strips // self.tiles)
        return turns * -(-pieces // self.slices) * (own + _PIECE_COST)


def slicing(strips: int, pieces: int, at_once: Sequence[int]) -> Slicing:
    """The division of `strips` strips of `pieces` * 128 columns that costs least; of equals, the
    one with the fewest slices.

    at_once[s - 1]: clusters of s CTAs that the device holds at once, 0 where it holds none.
    """
    tried = []
    for slices in range(1, min(len(at_once), pieces) + 1):
        if (clusters := at_once[slices - 1]) > 0:
            turns = -(-strips // (_SLICED_STRIPS * clusters))
            tiles = min(strips, turns * clusters)
            tried.append(Slicing(slices, tiles, min(tiles, clusters)))
    return min(tried, key=lambda one: (one.cost(strips, pieces), one.slices))


def ranged_columns(rows: int) -> int:
    """How many rows csrc/ranges.cu multiplies together."""
    return min(_RANGED_COLUMNS, key=lambda n: -(-rows // n) * (n + _COLUMNS_COST))


@dataclass(frozen=True)
class Ranging:
    """How csrc/ranges.cu divides `tiles` tiles of `pieces` pieces among `ctas` CTAs. All have as
    many whole tiles as each can. Pairs of CTAs have `held` pieces, if any, of one more, the first
    of them `cut`: all pieces, every two CTAs being a pair, or some, every tile being a pair's. What
    is left is cut in equal ranges."""

    tiles: int
    pieces: int
    ctas: int
    held: int = 0
    cut: int = 0

    @property
    def rest(self) -> int:
        """Pieces that a pair leaves of its tile."""
        return self.pieces - self.held if self.held else 0

    @property
    def left(self) -> int:
        """Tiles in ranges, whole or their rests."""
        return self.tiles % self.ctas - (self.ctas // 2 if self.held and not self.rest else 0)

    @property
    def members(self) -> int:
        """CTAs that have ranges, while there are pieces: those in no pair, or one of each pair."""
        alone = self.ctas - 2 * self.tiles if self.rest else self.ctas // (2 if self.held else 1)
        return min(alone, self.left * (self.rest or self.pieces))

    @property
    def shares(self) -> int:
        """Places for shares of tiles, one of them spare."""
        return self.members + self.left

    def splits_tiles(self) -> bool:
        """Whether shares of tiles are left, to be added."""
        units = self.left * self.pieces
        return bool(self.rest) or any(
            units * one // self.members % self.pieces for one in range(self.members)
        )


def ranging(tiles: int, pieces: int, ctas: int, pairs: int) -> Ranging:
    """The division on a device that holds at once `ctas` CTAs, or `pairs` clusters of two.

    Two CTAs have a tile together wherever as many tiles are left as there are pairs, or there are
    half as many and no others, since what they add goes through no memory.
    """
    alone = Ranging(tiles, pieces, min(ctas, tiles * pieces))
    if alone.ctas != 2 * pairs or pieces < 4:
        return alone
    if alone.left >= pairs:
        shared = alone.left - pairs
        most = -(-shared * pieces // pairs) + (_SHARE_COST if shared else 0)
        return Ranging(tiles, pieces, ctas, pieces, min((pieces + most) // 2, pieces - 1))
    if tiles < pairs <= 2 * tiles:
        held = min(tiles * pieces // pairs + _REST_COST, pieces)
        return Ranging(tiles, pieces, 2 * tiles if held == pieces else ctas, held, (held + 1) // 2)
    return alone
