"""Testing a saved model: `predictions` computes, `files` and `picture` write the results, `command` is the command."""
