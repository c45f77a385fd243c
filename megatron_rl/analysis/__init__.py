"""Programs that read runs: report, ledger, explain, traces, pictures. No run imports this package."""
