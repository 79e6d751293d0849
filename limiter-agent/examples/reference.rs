//! Writes what is generated from the command line's grammar into a directory: the shells'
//! completions, and the beginning of limiter-agent(8). `cargo xtask dist` runs it.

use std::env;
use std::error::Error;
use std::fs;
use std::io::Write as _;
use std::path::Path;

use clap::{Command, CommandFactory as _};
use clap_complete::Shell;
use clap_mangen::Man;
use limiter_agent::cli::Cli;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = env::args_os().nth(1).ok_or("name a directory")?;
    let directory = Path::new(&directory);
    for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
        clap_complete::generate_to(shell, &mut Cli::command(), "limiter-agent", directory)?;
    }
    fs::write(directory.join("limiter-agent.man"), page()?)?;
    Ok(())
}

/// The manual page up to the end of its commands.
fn page() -> Result<Vec<u8>, Box<dyn Error>> {
    // `help` and `--help` explain themselves.
    let mut command = Cli::command()
        .name("limiter-agent")
        .disable_help_subcommand(true)
        .disable_help_flag(true)
        .disable_version_flag(true);
    command.build();
    let man = Man::new(command.clone()).section("8").manual("limiter");
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    writeln!(page, ".SH SYNOPSIS")?;
    for subcommand in command.get_subcommands() {
        writeln!(page, ".PP\n{}", synopsis(subcommand)?)?;
    }
    man.render_description_section(&mut page)?;
    writeln!(page, ".SH COMMANDS")?;
    for subcommand in command.get_subcommands() {
        writeln!(page, ".SS {}", subcommand.get_name())?;
        let man = Man::new(subcommand.clone().disable_help_flag(true));
        page.extend(without_heading(|text| man.render_description_section(text))?.bytes());
        page.extend(without_heading(|text| man.render_options_section(text))?.bytes());
    }
    Ok(page)
}

fn synopsis(subcommand: &Command) -> Result<String, Box<dyn Error>> {
    let man = Man::new(subcommand.clone());
    without_heading(|text| man.render_synopsis_section(text))
}

/// What `render` writes, but for the heading at its beginning.
fn without_heading(
    render: impl FnOnce(&mut Vec<u8>) -> std::io::Result<()>,
) -> Result<String, Box<dyn Error>> {
    let mut text = Vec::new();
    render(&mut text)?;
    let text = String::from_utf8(text)?;
    let body: Vec<_> = text.lines().filter(|line| !line.starts_with(".SH ")).collect();
    Ok(body.join("\n") + "\n")
}
