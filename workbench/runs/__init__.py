"""Run directories: files, locks, clocks, the processes that share one."""
