"""How long a run will take: its iterations simulated, with costs from runs or data sheets, and the best split."""
