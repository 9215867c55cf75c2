"""Members of sweeps, searches and fleets as runs of their own."""
