"""The files from which a run resumes and is checked: the journal and the audit log."""
