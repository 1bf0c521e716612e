"""`hvdtrain explain`: who was waited for, where a step's time went, and what would change it."""
