"""2:4 sparsity: what sparse tensor cores run, as it stands and after permuting a layer's input channels.

Of every 4 consecutive input channels at most 2 may be nonzero, for each output channel and tap. Unstructured zeros at 90 %
break that in about 1 % of the places, and mostly do not once the input channels stand in another order, which costs
nothing at run time: the layer before writes its output channels in that order.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
"""[channels, words]: one bit per row of the K matrix (output channel and tap), set where the channel is nonzero."""
Longs = NDArray[np.int64]

_OPEN = 128
"""Groups of four that a channel may choose among while they are filled: more cost time and hardly help."""
_BUDGET = 4_000_000
"""Words that a layer's search may look at after its first filling, about 20 ms: for swaps, then for other fillings of
small layers. A count, not a clock: a scan gives the same everywhere."""
_SMALL = 128
"""Channels up to which a filling that came out far from 2:4 is tried another way: it is chance there."""
_STEP = 5_000
"""What a step costs besides its words, in words: small layers are bound by it."""
_SIDEWAYS = 20
"""Turns in a row without a gain before the search gives up, and four more for each group that breaks the rule."""


def is_two_four(nonzero: NDArray[np.uint8]) -> bool:
    """Whether every 4 consecutive input channels of [oc, icg, taps] (0 or 1) hold at most 2 nonzeros."""
    oc, icg, taps = nonzero.shape
    if icg % 4:
        return False
    fours = nonzero.reshape(oc, icg // 4, 4, taps)
    return bool((fours[:, :, 0] + fours[:, :, 1] + fours[:, :, 2] + fours[:, :, 3]).max() <= 2)


def find_order(nonzero: NDArray[np.uint8]) -> Longs | None:
    """An order of the input channels of [oc, icg, taps] in which it is 2:4, or None where none was found.

    None is a proof only where a row has more nonzeros than half its channels or icg is no multiple of 4: the search is
    greedy and bounded, and the same for the same zeros.
    """
    _, icg, _ = nonzero.shape
    if icg % 4 or not icg:
        return None
    if is_two_four(nonzero):
        return np.arange(icg)
    if 2 * int(np.count_nonzero(nonzero)) > nonzero.size or 2 * int(nonzero.sum(axis=1, dtype=np.int64).max()) > icg:
        return None
    bits = _pack(nonzero)
    fullest = np.argsort(-_count(bits), kind="stable")
    left, attempt, order = _BUDGET, 0, fullest
    while left > 0:
        groups = _fill(bits, order)
        if groups is not None:
            done, left = _swap(bits, groups, left)
            if done:
                return groups.reshape(-1)
        elif len(bits) > _SMALL:
            return None
        left -= bits.size * min(len(bits) // 4, _OPEN) + _STEP * len(bits)
        attempt += 1
        # Mostly the fullest first, and every time some other way.
        places = np.arange(len(bits)) + np.random.Generator(np.random.PCG64(attempt)).normal(
            0, len(bits) / 8, len(bits)
        )
        order = fullest[np.argsort(places, kind="stable")]
    return None


def _pack(nonzero: NDArray[np.uint8]) -> Words:
    rows = np.ascontiguousarray(nonzero.transpose(1, 0, 2)).reshape(nonzero.shape[1], -1)
    packed = np.packbits(rows, axis=1)
    return np.ascontiguousarray(np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))).view(np.uint64)


_BITS_OF = np.array([bin(value).count("1") for value in range(1 << 16)], np.uint8)


def _count(words: Words) -> Longs:
    """Set bits along the last axis."""
    if hasattr(np, "bitwise_count"):  # NumPy 2
        counts: Longs = np.bitwise_count(words).sum(-1, dtype=np.int64)
        return counts
    halves: Longs = _BITS_OF[np.ascontiguousarray(words).view(np.uint16)].sum(-1, dtype=np.int64)
    return halves


def _fill(bits: Words, order: Longs) -> Longs | None:
    """Groups [icg / 4, 4]: channel after channel, each where it makes fewest rows a third time nonzero.

    None as soon as more rows break the rule than swaps mend: one in two groups, or 16 in small layers.
    """
    channels, words = bits.shape
    count = channels // 4
    taken = np.zeros((2, count, words), np.uint64)  # rows where a group has one nonzero or more, two or more
    groups, sizes = np.zeros((count, 4), np.int64), np.zeros(count, np.int64)
    left, broken, weigh = count, 0, 64 * words + 1
    for channel in order:
        row = bits[channel]
        once, twice = _count(taken[:, : min(left, _OPEN)] & row)
        chosen = int((twice * weigh + once).argmin())
        broken += int(twice[chosen])
        if broken > max(16, count // 2):
            return None
        ones, twos = taken[:, chosen]
        twos |= ones & row
        ones |= row
        groups[chosen, sizes[chosen]] = channel
        sizes[chosen] += 1
        if sizes[chosen] == 4:  # full groups go behind the open ones, and are not looked at again
            left -= 1
            taken[:, chosen], sizes[chosen] = taken[:, left], sizes[left]
            groups[[chosen, left]] = groups[[left, chosen]]
    return groups


def _swap(bits: Words, groups: Longs, left: int) -> tuple[bool, int]:
    """Exchange channels between groups, in place: whether no row breaks the rule any more, and words left to look at."""
    two, three = np.zeros_like(bits), np.zeros_like(bits)  # rows where a channel's three mates have two, or all three
    group_of = np.zeros(len(bits), np.int64)
    broken = np.zeros(len(groups), np.int64)
    for number in range(len(groups)):
        broken[number] = _settle(bits, groups, number, two, three, group_of)
    sideways = turn = 0
    while broken.any() and left > 0:
        wrong = np.flatnonzero(broken)
        number = int(wrong[turn % len(wrong)])
        turn += 1
        gain, channel, other = min(
            _best_partner(bits, groups, number, int(channel), two, three, group_of, broken, turn)
            for channel in groups[number]
        )
        left -= 8 * bits.size + 4 * _STEP
        sideways = 0 if gain < 0 else sideways + 1
        if sideways > _SIDEWAYS + 4 * len(wrong):
            return False, left
        if gain > 0:
            continue
        home = int(group_of[other])
        groups[number][groups[number] == channel] = other
        groups[home][groups[home] == other] = channel
        for changed in (number, home):
            broken[changed] = _settle(bits, groups, changed, two, three, group_of)
    return not broken.any(), left


def _settle(bits: Words, groups: Longs, number: int, two: Words, three: Words, group_of: Longs) -> int:
    """Bring what is known of a group up to date; the rows of it that break the rule."""
    members = groups[number]
    group_of[members] = number
    for channel in members:
        a, b, c = bits[members[members != channel]]
        two[channel], three[channel] = (a & b) | ((a | b) & c), a & b & c
    last = members[3]
    return int(_count(three[last] | (two[last] & bits[last])))


def _best_partner(
    bits: Words, groups: Longs, number: int, channel: int, two: Words, three: Words, group_of: Longs, broken: Longs,
    turn: int,
) -> tuple[int, int, int]:  # fmt: skip
    """(change in broken rows, channel, the channel to exchange it with): least change, another of equals every turn."""
    after = _count(three[channel] | (two[channel] & bits)) + _count(three | (two & bits[channel]))
    change = after - broken[number] - broken[group_of]
    change[groups[number]] = np.iinfo(np.int64).max
    equals = np.flatnonzero(change == change.min())
    other = int(equals[turn % len(equals)])
    return int(change[other]), channel, other
