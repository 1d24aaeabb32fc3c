from rankprobe.cli import main

main()
