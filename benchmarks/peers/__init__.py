"""Other trainers, each in an environment of its own under .cache/bench/."""
