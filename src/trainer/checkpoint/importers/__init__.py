"""Other trainers' checkpoints, read without running anything that is in them.

`recognise` tells by names whose a directory is (discovery shows it as the reason why a directory is foreign); `hf_trainer`
and `dcp_states` read what can be brought in, through `torch_files` and `dcp`, into the `ForeignState` of `foreign`;
`schedules` finds the learning-rate schedule that it was under. `train.importing` makes a checkpoint of it.
"""
