"""Programs that read runs: planner, report, ledger, explain, traces, pictures. No run imports this package."""
