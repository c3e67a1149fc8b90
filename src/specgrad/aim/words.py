"""Words in the matrices up to rotation and reversal, and the sparse operators of the moment hierarchy.

A trace does not change when its factors are rotated or, for symmetric matrices, reversed. A word is an integer in base K,
and its class is named by the smallest of its images.
"""

from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse import coo_matrix, csr_matrix

# Words of all lengths that still fit in memory together.
_MOST_WORDS = 4_000_000


@dataclass(frozen=True, eq=False)
class WordSpace:
    """Classes of words of length 1 to ``order``, shortest first.

    Attributes:
        letters: number of matrices K.
        order: largest length M.
        lengths: length of each class.
        codes: integer of each class's representative, in base K.
        class_of: for each length, the class of every integer.
    """

    letters: int
    order: int
    lengths: Int[np.ndarray, " classes"]
    codes: Int[np.ndarray, " classes"]
    class_of: tuple[Int[np.ndarray, " _"], ...]

    @property
    def words(self) -> list[tuple[int, ...]]:
        """Representatives as tuples of indices from 0."""
        found = []
        for code, length in zip(self.codes.tolist(), self.lengths.tolist(), strict=True):
            found.append(tuple(code // self.letters ** (length - 1 - i) % self.letters for i in range(length)))
        return found

    def place(self, word: tuple[int, ...]) -> int:
        """Number of a word's class; indices from 0."""
        code = 0
        for letter in word:
            code = code * self.letters + letter
        return int(self.class_of[len(word) - 1][code])

    def count(self, letters: tuple[int, ...]) -> Int[np.ndarray, " classes"]:
        """How many letters of each class are among ``letters``."""
        total = np.zeros(len(self.codes), dtype=np.int64)
        for position in range(self.order):
            digit = self.codes // self.letters**position % self.letters
            total += np.isin(digit, letters) & (position < self.lengths)
        return total


@lru_cache(maxsize=16)
def word_space(letters: int, order: int, *, merge: bool = True) -> WordSpace:
    """Classes of words, or all words if ``merge`` is False.

    Raises:
        ValueError: for an order < 1 or one whose words do not fit in memory.

    Example:
        >>> [len(word_space(2, order).codes) for order in (4, 8, 12)]
        [15, 84, 558]
    """
    if order < 1:
        raise ValueError(f"`order` of `aim.solve` must be >= 1; got {order}.")
    if letters**order > _MOST_WORDS:
        raise ValueError(
            f"`order` of `aim.solve` must be smaller for {letters} matrices; got {order}, that is {letters**order:,} words."
        )
    lengths, codes, class_of, offset = [], [], [], 0
    for length in range(1, order + 1):
        images = np.arange(letters**length)
        smallest = _canonical(images, letters, length) if merge else images
        names, inverse = np.unique(smallest, return_inverse=True)
        class_of.append(inverse + offset)
        codes.append(names)
        lengths.append(np.full(len(names), length))
        offset += len(names)
    return WordSpace(letters, order, np.concatenate(lengths), np.concatenate(codes), tuple(class_of))


def _canonical(codes: Int[np.ndarray, " words"], letters: int, length: int) -> Int[np.ndarray, " words"]:
    """Smallest of all rotations of the words and of their reversals."""
    top = letters ** (length - 1)
    reversed_codes, rest = np.zeros_like(codes), codes.copy()
    for _ in range(length):
        reversed_codes = reversed_codes * letters + rest % letters
        rest //= letters
    smallest: Int[np.ndarray, " words"] = np.minimum(codes, reversed_codes)
    for start in (codes, reversed_codes):
        rotated = start
        for _ in range(length - 1):
            rotated = rotated // letters + rotated % letters * top
            smallest = np.minimum(smallest, rotated)
    return np.asarray(smallest)


def insertion_operator(space: WordSpace, letter: int, inserted: int) -> csr_matrix:
    """``A_kl``: row of a word sums the words with ``l`` inserted before and after each of its letters ``k``.

    Words that grow beyond the order are left out, which is the truncation.

    Example:
        >>> space = word_space(2, 4)
        >>> insertion_operator(space, 0, 0).nnz, insertion_operator(space, 0, 1).nnz
        (6, 7)

    Source: attention-indexed models, equation (11).
    """
    base = space.letters
    rows, columns = [], []
    for length in range(1, space.order):
        numbers = np.flatnonzero(space.lengths == length)
        codes = space.codes[numbers]
        for position in range(length):
            has = codes // base**position % base == letter
            for gap in (position, position + 1):
                high, low = codes[has] // base**gap, codes[has] % base**gap
                rows.append(numbers[has])
                columns.append(space.class_of[length][(high * base + inserted) * base**gap + low])
    size = len(space.codes)
    if not rows:
        return csr_matrix((size, size))
    where = (np.concatenate(rows), np.concatenate(columns))
    operator = csr_matrix(coo_matrix((np.ones(len(where[0])), where), shape=(size, size)))
    operator.sum_duplicates()
    return operator


def wishart_word(word: tuple[int, ...], ratios: tuple[float, ...], scales: tuple[float, ...]) -> Float[np.ndarray, ""]:
    """``lim tr(S_k1 ... S_kw)`` of independent Wishart matrices, by splitting off the first factor.

    Column by column, ``m(a w) = c_a s_a H(a, w)`` with ``H(a, w) = m(w) + sum_{j: w_j = a} m(w_<j) s_a H(a, w_>j)``: the
    first factor either pairs with nothing, or with a later factor of its own kind, which cuts the word in two.

    Example:
        >>> float(wishart_word((0, 0, 1, 1), (1.0, 1.0), (1.0, 1.0))), float(wishart_word((0, 1, 0, 1), (1, 1), (1, 1)))
        (4.0, 3.0)
    """

    @cache
    def moment(w: tuple[int, ...]) -> float:
        return ratios[w[0]] * scales[w[0]] * following(w[0], w[1:]) if w else 1.0

    @cache
    def following(a: int, w: tuple[int, ...]) -> float:
        total = moment(w)
        for j, letter in enumerate(w):
            if letter == a:
                total += moment(w[:j]) * scales[a] * following(a, w[j + 1 :])
        return total

    return np.asarray(moment(word))
