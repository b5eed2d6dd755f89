"""Bringing sharded matrices together on one rank each, and their results back.

A matrix that is cut over the ranks of a mesh dimension can only be orthogonalised whole. Per round of matrices there is
one all-to-all that sends every piece to the owner of its matrix, and one that sends the pieces of the results back. Where
the mesh also has replicas, each matrix has one owner among all ranks, the pieces come from the owner's own replica, and
a last all-gather hands the results to the other replicas: they get the same bits.
"""

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer.errors import TrainingError


@dataclass(frozen=True)
class Layout:
    """How the matrices of a tensor lie on a mesh.

    Attributes:
        shard: mesh dimension over which a matrix is cut, None if every rank holds whole ones.
        tensor_dim: the tensor's dimension that is cut (meaningless without `shard`).
        replica: mesh dimension over which there are equal copies, or None.
    """

    mesh: DeviceMesh
    shard: int | None
    tensor_dim: int
    replica: int | None

    def size(self, mesh_dim: int | None) -> int:
        return 1 if mesh_dim is None else self.mesh.size(mesh_dim)

    def rank(self, mesh_dim: int | None) -> int:
        return 0 if mesh_dim is None else self.mesh.get_local_rank(mesh_dim)

    @property
    def owners(self) -> int:
        """Ranks that share the matrices among them. Owner o has replica o // shard ranks, shard rank o % shard ranks."""
        return self.size(self.replica) * self.size(self.shard)

    def piece_sizes(self, length: int) -> list[int]:
        """Returns how many of `length` rows (or columns) each shard rank holds: torch.chunk's rule, as DTensor's."""
        ranks = self.size(self.shard)
        each = math.ceil(length / ranks)
        return [min(each, max(0, length - rank * each)) for rank in range(ranks)]


def layout_of(parameter: Tensor) -> Layout | None:
    """Returns the layout of a tensor whose last two dimensions are matrices; None if this rank needs no other.

    Raises:
        TrainingError: a matrix is cut over two mesh dimensions, or in a way that is not plain sharding.
    """
    if not isinstance(parameter, DTensor):
        return None
    mesh, first_of_matrix = parameter.device_mesh, parameter.ndim - 2
    shard, tensor_dim, replica = None, 0, None
    for mesh_dim, placement in enumerate(parameter.placements):
        if mesh.size(mesh_dim) == 1:
            continue
        if type(placement) is Replicate and replica is None:
            replica = mesh_dim
        elif type(placement) is Shard and placement.dim >= first_of_matrix and shard is None:
            shard, tensor_dim = mesh_dim, placement.dim
        elif not (type(placement) is Shard and placement.dim < first_of_matrix):
            raise TrainingError(
                f"Muon cannot bring a matrix of shape {list(parameter.shape)} with placements {parameter.placements} "
                "together: it takes plain shards over one mesh dimension and copies over one other; put this "
                "parameter into an adamw group"
            )
    return None if shard is None and replica is None else Layout(mesh, shard, tensor_dim, replica)


def assign_owners(costs: Sequence[float], loads: list[float]) -> list[int]:
    """Returns an owner for each cost: the dearest first, each to the least loaded; ties go to the lowest number.

    Args:
        loads: what each owner has already; the new costs are added in place.
    """
    heap = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, owner = heapq.heappop(heap)
        owners[index] = owner
        heapq.heappush(heap, (load + costs[index], owner))
    for load, owner in heap:
        loads[owner] = load
    return owners


class Round:
    """One exchange. Call `piece` for every item, then collect, whole, give_back and result, in this order.

    Every rank of the layout's mesh builds it from the same shapes and owners. Between `collect` and `whole`, and between
    `give_back` and the first `result`, the transfer runs on its own.
    """

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[torch.Size],
        owners: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        """`shapes`: of the whole tensors (of this rank's part where another dimension is sharded, too)."""
        self.layout, self.shapes, self.dtype, self.device = layout, list(shapes), dtype, device
        self.column = layout.rank(layout.shard)
        self.row = layout.rank(layout.replica)
        columns, rows = layout.size(layout.shard), layout.size(layout.replica)
        self.items = [[[] for _ in range(columns)] for _ in range(rows)]
        for index in sorted(range(len(shapes)), key=lambda index: tuple(shapes[index])):  # equal shapes side by side
            self.items[owners[index] // columns][owners[index] % columns].append(index)
        # Where this rank's pieces lie: in the buffer of the owner's row, in the order of the columns.
        self.row_elements, self.offsets = [0] * rows, [0] * len(shapes)
        for row, owned in enumerate(self.items):
            for index in (index for items in owned for index in items):
                self.offsets[index] = self.row_elements[row]
                self.row_elements[row] += self._piece_shape(index, self.column).numel()
        self.row_of = {index: row for row, owned in enumerate(self.items) for items in owned for index in items}
        self.stride = max(self.row_elements)  # rows differ a little; an all-gather wants them equal
        self.buffer = torch.empty(rows * self.stride, dtype=dtype, device=device)
        self._pending: dist.Work | None = None

    def _piece_shape(self, index: int, column: int) -> torch.Size:
        shape, dim = list(self.shapes[index]), self.layout.tensor_dim
        if self.layout.shard is not None:
            shape[dim] = self.layout.piece_sizes(shape[dim])[column]
        return torch.Size(shape)

    def piece(self, index: int) -> Tensor:
        """Returns where this rank's piece of item `index` goes, and where its result will be: a view, [piece shape]."""
        start = self.row_of[index] * self.stride + self.offsets[index]
        shape = self._piece_shape(index, self.column)
        return self.buffer[start : start + shape.numel()].view(shape)

    result = piece

    def collect(self) -> None:
        """Starts sending all pieces to their owners."""
        mine = self.items[self.row]
        sent = self._row_buffer()
        self._send_sizes = [sum(self._piece_shape(i, self.column).numel() for i in items) for items in mine]
        columns = range(len(mine))
        self._receive_sizes = [sum(self._piece_shape(i, c).numel() for i in mine[self.column]) for c in columns]
        if self.layout.shard is None:
            self._received = sent
            return
        self._received = torch.empty(sum(self._receive_sizes), dtype=self.dtype, device=self.device)
        self._pending = dist.all_to_all_single(
            self._received,
            sent,
            self._receive_sizes,
            self._send_sizes,
            group=self.layout.mesh.get_group(self.layout.shard),
            async_op=True,
        )

    def whole(self) -> list[tuple[list[int], Tensor]]:
        """Returns what this rank owns, by shape: items, and their whole tensors as [items, *shape]."""
        self._wait()
        batches = []
        for indices, pieces in self._batches():
            shape = self.shapes[indices[0]]
            batch = torch.empty((len(indices), *shape), dtype=self.dtype, device=self.device)
            for part, piece in zip(self._parts(batch), pieces, strict=True):
                part.copy_(piece)
            batches.append((indices, batch))
        return batches

    def give_back(self, results: Sequence[Tensor]) -> None:
        """Starts sending the results, one [items, *shape] for each batch of `whole`, to where the pieces came from."""
        for (_, pieces), batch in zip(self._batches(), results, strict=True):
            for part, piece in zip(self._parts(batch), pieces, strict=True):
                piece.copy_(part)
        if self.layout.shard is not None:
            self._pending = dist.all_to_all_single(
                self._row_buffer(),
                self._received,
                self._send_sizes,
                self._receive_sizes,
                group=self.layout.mesh.get_group(self.layout.shard),
                async_op=True,
            )

    def finish(self) -> None:
        """Waits until every `result` is there."""
        self._wait()
        if self.layout.replica is not None:
            own = self.buffer[self.row * self.stride : (self.row + 1) * self.stride].clone()
            group = self.layout.mesh.get_group(self.layout.replica)
            dist.all_gather_into_tensor(self.buffer, own, group=group)

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def _row_buffer(self) -> Tensor:
        start = self.row * self.stride
        return self.buffer[start : start + self.row_elements[self.row]]

    def _batches(self) -> list[tuple[list[int], list[Tensor]]]:
        """Returns per shape the owned items and, per column, their received pieces as one view [items, *piece shape]."""
        owned = self.items[self.row][self.column]
        starts = [0]
        for size in self._receive_sizes[:-1]:
            starts.append(starts[-1] + size)
        batches = []
        for shape in dict.fromkeys(self.shapes[index] for index in owned):
            indices = [index for index in owned if self.shapes[index] == shape]
            pieces = []
            for column in range(len(starts)):
                piece_shape = self._piece_shape(indices[0], column)
                elements = len(indices) * piece_shape.numel()
                flat = self._received[starts[column] : starts[column] + elements]
                pieces.append(flat.view(len(indices), *piece_shape))
                starts[column] += elements
            batches.append((indices, pieces))
        return batches

    def _parts(self, batch: Tensor) -> Sequence[Tensor]:
        if self.layout.shard is None:
            return (batch,)
        dim = self.layout.tensor_dim + 1
        return batch.split(self.layout.piece_sizes(batch.shape[dim]), dim)
