"""The sections of a run's configuration that are more than a few settings, a file each; `config` has the others."""
