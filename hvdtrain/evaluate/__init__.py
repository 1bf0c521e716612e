"""Testing a saved model: `predictions` computes, `files` writes the results, `command` is the command."""
