"""Testing a saved model: `answers` asks it, `files` and `picture` write down what it said, `command` is the command."""
