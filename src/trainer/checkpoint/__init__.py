"""Checkpoints that exist or do not.

Reading order: `app_state` (what is saved, and the proof that a load took), `storage` and `layout` (tensors and their
files), `leaves` (everything else, as JSON), `manifest` (what makes a directory a checkpoint), `store` (commit, removal,
clearing up), `discovery` (what lies there), `retention` (what may go), `manager` (when, which, and in what order).
"""
