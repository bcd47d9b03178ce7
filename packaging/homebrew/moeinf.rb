# The command line and the server, in an environment of its own. A tap keeps this file as
# Formula/moeinf.rb. scripts/recipes.py sets the version and the hash at a release; before the first
# one the hash is zeros. On macOS nobody has run this yet.
class Moeinf < Formula
  include Language::Python::Virtualenv

  desc "Runs big Mixture-of-Experts models on machines with little memory"
  homepage "https://pypi.org/project/moeinf/"
  url "https://files.pythonhosted.org/packages/source/m/moeinf/moeinf-0.2.0.tar.gz"
  sha256 "0000000000000000000000000000000000000000000000000000000000000000"
  license "Apache-2.0"

  depends_on "python@3.13"

  # Wheels, torch's among them, leave no room for the longer paths of the Cellar.
  preserve_rpath

  def install
    virtualenv_create(libexec, "python3.13", system_site_packages: false)
    system "python3.13", "-m", "pip", "--python", libexec/"bin/python", "install",
           "--constraint", "constraints.txt",
           "--extra-index-url", "https://download.pytorch.org/whl/cpu", buildpath
    bin.install_symlink libexec/"bin/moeinf"
  end

  service do
    run [opt_bin/"moeinf", "serve"]
    keep_alive true
    log_path var/"log/moeinf.log"
    error_log_path var/"log/moeinf.log"
  end

  test do
    ENV["MOEINF_HOME"] = testpath
    ENV["MOEINF_NO_SERVER"] = "1"
    assert_equal "42", shell_output("#{bin}/moeinf run demo 17+25=").strip
  end
end
