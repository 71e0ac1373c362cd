"""How a cache row lies in the byte vectors of integer dot products with an unsigned operand."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import te, tirx

KEYS_PER_DOT = 4
# Unpack instructions work within groups of 16 bytes.
_GROUP_BYTES = 16


@dataclass(frozen=True)
class RowVectors:
    """Rows of `columns` stored elements as vectors of `size` bytes, size <= shared x columns.

    The last vector ends with the row: where rows are no multiple of a vector, it begins with columns that the one
    before has already, `gap` of them. No load reaches beyond a row; the digits that meet such a column twice are zero.
    Padded rows have all vectors side by side.

    shared: rows that lie side by side in a vector of size = shared x columns: 4 of these are 4 shared keys.
    """

    size: int
    columns: int
    shared: int = 1

    @property
    def row_size(self) -> int:
        """Bytes of one row in a vector."""
        return self.size // self.shared

    @property
    def quad(self) -> int:
        """Keys that are arranged together, in groups of 4."""
        return KEYS_PER_DOT * self.shared

    @property
    def lanes(self) -> int:
        """Lanes of 4 bytes."""
        return self.size // KEYS_PER_DOT

    @property
    def groups(self) -> int:
        """Groups of 4 lanes: 4 keys of one group of columns each."""
        return self.size // _GROUP_BYTES

    @property
    def row_groups(self) -> int:
        """Groups of columns of one row in a vector."""
        return self.groups // self.shared

    @property
    def count(self) -> int:
        """Vectors of a row."""
        return -(-self.columns // self.row_size)

    @property
    def padded(self) -> int:
        return self.count * self.row_size

    @property
    def gap(self) -> int:
        return self.padded - self.columns

    def _column(self, position):
        """The column at a position of a padded row."""
        if not self.gap:
            return position
        return tirx.min(position // self.size * self.size, self.columns - self.size) + position % self.size

    def position(self, column):
        """Where a padded row has a column for the first time."""
        if not self.gap:
            return column
        return column + column // ((self.count - 1) * self.size) * self.gap

    def accumulator_position(self, column):
        """Where the accumulator holds a column: the order in which the lanes of `sv_gemm_digits` come."""
        padded = self.position(column)
        block, inner = padded // self.size, padded % self.size
        group, vector = inner // _GROUP_BYTES, inner % _GROUP_BYTES // 4
        return block * self.size + vector * self.lanes + group * 4 + padded % 4

    def load(self, cache_rows, last_row, name: str):
        """Rows [T_block, C] as they are stored, padded; rows past the last valid one repeat it.

        Where they share vectors: [T_block / shared, size], in row 4 t + r the keys 4 shared t + r, + 4, ..
        """
        keys = int(cache_rows.shape[0])

        def element(t, c):
            key, column = t, self._column(c)
            if self.shared > 1:
                key, column = t // 4 * self.quad + t % 4 + c // self.row_size * 4, c % self.row_size
            return cache_rows[tirx.min(tirx.Cast("int64", key), tirx.Cast("int64", last_row)), column]

        return te.compute((keys // self.shared, self.count * self.size), element, name=name)
