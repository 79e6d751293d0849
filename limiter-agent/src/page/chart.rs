//! Stacked areas over time, as SVG.
//!
//! Only numbers get in here; names stand beside a chart, in a table. The style sheet gives the colours, by what
//! `fill` and `stroke` are written here, so that one chart is right in the light and in the dark.

use plotters::coord::Shift;
use plotters::prelude::{
    AreaSeries, ChartBuilder, Color as _, DrawingArea, DrawingAreaErrorKind, IntoDrawingArea as _,
    IntoFont as _, LineSeries, RGBColor, SVGBackend, ShapeStyle, TRANSPARENT,
};
use plotters::style::TextStyle;

use super::words::short;

/// Colours there are for layers: `#010000` and so on in a chart, `--c0` and so on in the style sheet.
pub(super) const COLOURS: u8 = 8;

/// In units that become wider with the page. Small, so that letters can be read on a phone.
const SIZE: (u32, u32) = (420, 190);
const LETTERS: u32 = 12;
/// What the style sheet makes the colour of thin lines.
const LINES: RGBColor = RGBColor(2, 0, 0);
/// And of letters.
const INK: RGBColor = RGBColor(3, 0, 0);
/// And of the page behind, which parts the layers.
const PAPER: RGBColor = RGBColor(4, 0, 0);

/// A part of a stack.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layer<'a> {
    /// The number of its colour, below [`COLOURS`].
    pub(super) colour: u8,
    /// One for each of the times.
    pub(super) values: &'a [f64],
}

/// The layers, the lowest first, over `times` (in minutes from now), of which `range` minutes are shown.
///
/// # Errors
/// As plotters says; it has no reason to.
pub(super) fn stacked(range: f64, times: &[f64], layers: &[Layer<'_>]) -> Result<String, String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        draw(&area, range, times, layers)
            .and_then(|()| area.present())
            .map_err(|error| error.to_string())?;
    }
    Ok(svg)
}

fn draw<'a>(
    area: &DrawingArea<SVGBackend<'a>, Shift>,
    range: f64,
    times: &[f64],
    layers: &[Layer<'_>],
) -> Result<
    (),
    DrawingAreaErrorKind<<SVGBackend<'a> as plotters::backend::DrawingBackend>::ErrorType>,
> {
    // What a layer and those below it come to.
    let mut sums = vec![vec![0.0; times.len()]];
    for layer in layers {
        let below = &sums[sums.len() - 1];
        sums.push(below.iter().zip(layer.values).map(|(below, value)| below + value).collect());
    }
    let highest = sums.iter().flatten().copied().fold(0.0, f64::max);
    let letters = || TextStyle::from(("sans-serif", LETTERS).into_font()).color(&INK);
    let mut chart = ChartBuilder::on(area)
        .margin_top(8)
        .margin_right(16)
        .x_label_area_size(20)
        .y_label_area_size(44)
        .build_cartesian_2d(-range..0.0, 0.0..f64::max(highest * 1.05, 1.0))?;
    chart
        .configure_mesh()
        .disable_x_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(LINES)
        .axis_style(LINES)
        .x_labels(5)
        .y_labels(5)
        .x_label_style(letters())
        .y_label_style(letters())
        .x_label_formatter(&|minutes| when(*minutes))
        .y_label_formatter(&|rate| short(*rate))
        .draw()?;
    // From the highest sum down: each covers what does not belong to it.
    for (layer, sums) in layers.iter().zip(&sums[1..]).rev() {
        let points = || times.iter().copied().zip(sums.iter().copied());
        chart.draw_series(AreaSeries::new(points(), 0.0, RGBColor(1, 0, layer.colour)))?;
        let edge = ShapeStyle { color: PAPER.to_rgba(), filled: false, stroke_width: 1 };
        chart.draw_series(LineSeries::new(points(), edge))?;
    }
    Ok(())
}

fn when(minutes: f64) -> String {
    if minutes > -0.01 { "now".to_owned() } else { format!("\u{2212}{:.0}\u{a0}min", -minutes) }
}
