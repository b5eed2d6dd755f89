"""Worker: our plan of an epoch: shuffle, best-fit-decreasing, order of the rows."""

import json
import sys

import numpy as np

from benchmarks.gate import Gate, Stopped
from trainer.config.data import DataConfig, FakeConfig
from trainer.core.log import setup_logging
from trainer.data.corpus import Corpus
from trainer.data.epoch import plan_epoch
from trainer.data.fake import FakeDocuments


def main() -> None:
    """Plans one epoch after the other; notes the fraction of the rows' tokens that are useful."""
    setup_logging("error", rank=0)
    arguments = json.loads(sys.argv[1])
    lengths, seq_len = np.load(arguments["lengths"]), arguments["seq_len"]
    fake = FakeConfig(documents=len(lengths))
    config = DataConfig(fake=fake, seq_len=seq_len)
    documents = FakeDocuments(fake, seed=0, purpose="bench", documents=len(lengths))
    documents.lengths, documents.supervised = lengths, lengths - 1
    corpus = Corpus([documents], seq_len, name="bench")
    gate = Gate(lambda threads: None)
    epoch = 0
    try:
        while True:
            gate.before_step()
            plan = plan_epoch(corpus, config, None, seed=0, epoch=epoch)
            epoch += 1
            gate.note(rows=len(plan), fill=float(lengths.sum()) / (len(plan) * seq_len))
    except Stopped:
        pass


if __name__ == "__main__":
    main()
