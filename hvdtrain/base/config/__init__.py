"""The configuration of a job. It knows no mode, model or codec."""
