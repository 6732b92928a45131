"""Which bad results become incidents: new ones, known ones, consequences of earlier ones."""
