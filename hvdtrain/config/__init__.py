"""What a job is asked to do: the ground that everything stands on. It knows no mode, model or codec."""
