"""One script under several precisions, and which of them suits it: from run folders alone, without torch."""
