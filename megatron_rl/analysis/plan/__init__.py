"""The planner: simulates a run's iterations, with costs from runs or data sheets, and searches the best split."""
