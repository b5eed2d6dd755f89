"""Worker in TRL's environment: its best-fit-decreasing packing of documents whose lengths are given."""

import json
import sys

import numpy as np
import pyarrow as pa
from datasets import Dataset, disable_progress_bars
from trl import data_utils  # pyright: ignore[reportMissingImports, reportAttributeAccessIssue]

from benchmarks.gate import Gate, Stopped


def main() -> None:
    """Packs again and again; notes the fraction of the rows' tokens that are useful."""
    arguments = json.loads(sys.argv[1])
    disable_progress_bars()
    lengths, seq_len = np.load(arguments["lengths"]), arguments["seq_len"]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    tokens = np.zeros(offsets[-1], np.int32)
    table = pa.table({"input_ids": pa.ListArray.from_arrays(offsets, tokens)})
    dataset = Dataset(table)
    gate = Gate(lambda threads: None)
    try:
        while True:
            gate.before_step()
            match arguments["variant"]:
                case "plan and copy":  # all documents at once, in memory
                    rows = data_utils._pack_bfd(table, seq_len).num_rows
                case "pack_dataset, all at once":
                    rows = len(_pack(data_utils.pack_dataset, dataset, seq_len, batch_size=len(lengths)))
                case _:  # pack_dataset as SFTTrainer calls it: packs within groups of 1000 documents
                    rows = len(_pack(data_utils.pack_dataset, dataset, seq_len))
            gate.note(rows=rows, fill=float(lengths.sum()) / (rows * seq_len))
    except Stopped:
        pass


def _pack(pack_dataset, dataset: Dataset, seq_len: int, **map_kwargs) -> Dataset:
    return pack_dataset(dataset, seq_len, "bfd", {"keep_in_memory": True, "load_from_cache_file": False, **map_kwargs})


if __name__ == "__main__":
    main()
