// Numbers as text.
// Defines: whole, number, fixed, percent, duration, bytes, plural.

const MISSING = "–";
const isMissing = (value) => value === null || value === undefined;
const whole = (value) => value.toLocaleString("en-GB");

function number(value) {
  if (isMissing(value) || Number.isNaN(value)) return MISSING;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return whole(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace("-", "−");
  const maximumFractionDigits = size >= 100 ? 1 : size >= 10 ? 2 : 4;
  return value.toLocaleString("en-GB", { maximumFractionDigits }).replace("-", "−");
}

const fixed = (value, digits) => (isMissing(value) ? MISSING : value.toFixed(digits).replace("-", "−"));
const percent = (value) => (isMissing(value) ? MISSING : `${(100 * value).toFixed(0)}%`);

function duration(seconds) {
  if (isMissing(seconds)) return MISSING;
  if (seconds < 1) return `${number(Number((1000 * seconds).toPrecision(3)))} ms`;
  if (seconds < 120) return `${seconds.toFixed(seconds < 10 ? 1 : 0)} s`;
  if (seconds < 7200) return `${(seconds / 60).toFixed(0)} min`;
  return `${(seconds / 3600).toFixed(1)} h`;
}

function bytes(count) {
  if (isMissing(count)) return MISSING;
  if (count >= 1e9) return `${(count / 1e9).toFixed(2)} GB`;
  return count >= 1e6 ? `${(count / 1e6).toFixed(1)} MB` : `${(count / 1e3).toFixed(0)} kB`;
}

const plural = (count, one, many = `${one}s`) => `${whole(count)} ${count === 1 ? one : many}`;
