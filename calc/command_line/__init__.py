"""What both command lines share: flags made from a plan, answers as text, exit codes."""
